"""The command line, the same for all scripts."""

import argparse
import os
from pathlib import Path

import torch

from common.errors import refuse
from common.path import check_path


def parse_args(argv=None, world_size=1, local_world_size=1, speaks=True):
    """Parse and check the options.

    Args:
        argv (list of str): the arguments; None: those of the command line.
        world_size (int): processes in the run; None: the option --nproc says how many.
        local_world_size (int): those of them that run on this machine; 0: nobody started them.
        speaks (bool): whether this process is the one that describes the run and reports errors.
    Returns:
        argparse.Namespace: the options, and world_size, speaks, and threads (CPU threads for this process).
    Raises:
        SystemExit: code 2 and one line on stderr for an error, code 0 after --help.
    """
    parser = argparse.ArgumentParser(
        description="Train an image classifier; the number of processes does not change the result.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--dataset", choices=["digits", "fashion-mnist", "cifar10"], default="digits", help="images")
    parser.add_argument("--data-root", type=Path, default=Path("data"), help="folder of the downloaded data sets")
    parser.add_argument("--model", choices=["cnn", "resnet18"], default="cnn", help="network")
    parser.add_argument("--epochs", type=_number(int, 1), default=10, help="passes over the training images")
    parser.add_argument("--batch-size", type=_number(int, 1), default=48, help="images a step, all processes together")
    parser.add_argument("--lr", type=_number(float, 0), default=0.02, help="learning rate")
    parser.add_argument("--seed", type=_number(int, 0), default=0, help="of the weights and the order of the images")
    parser.add_argument(
        "--checkpoint", type=Path, metavar="PATH", help="save here after every epoch, and go on from there if it exists"
    )
    if world_size is None:
        nproc = torch.cuda.device_count() if torch.cuda.is_available() else 2
        parser.add_argument("--nproc", type=_number(int, 1), default=nproc, help="processes to start")
    args = argparse.Namespace(speaks=speaks)
    parser.error = lambda message: refuse(args, f"{message}; --help shows the options")
    if not speaks:
        parser.print_help = lambda file=None: None
    parser.parse_args(argv, args)

    if local_world_size == 0:
        args.speaks = True
        script = parser.prog if parser.prog.endswith(".py") else "ddp_torchrun.py"
        refuse(args, f"start this script with torchrun: torchrun --standalone --nproc_per_node=2 {script}")
    if "TORCHELASTIC_RUN_ID" in os.environ and world_size != int(os.environ["WORLD_SIZE"]):
        args.speaks = os.environ["RANK"] == "0"
        way_out = "give it ddp_torchrun.py, or start this script with python"
        refuse(args, f"torchrun's processes would each train alone; {way_out}")
    if world_size is None:
        world_size = local_world_size = args.nproc
    args.world_size = world_size
    _check_processes(args, local_world_size)
    check_path(args)
    return args


def _check_processes(args, local_world_size):
    """Refuse what cannot be divided among the processes, and set args.threads, this process's share of the cores."""
    if args.batch_size % args.world_size:
        below = max(args.batch_size // args.world_size, 1) * args.world_size
        refuse(
            args,
            f"--batch-size {args.batch_size} does not divide among {args.world_size} processes; "
            f"{below} and {below + args.world_size} do",
        )
    gpus = torch.cuda.device_count()
    if torch.cuda.is_available() and local_world_size > gpus:
        refuse(
            args,
            f"{local_world_size} processes need as many GPUs, this machine shows {gpus}; start at most {gpus}, "
            "or set CUDA_VISIBLE_DEVICES= (empty) to run on the CPU",
        )
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    chosen = os.environ.get("OMP_NUM_THREADS", "")
    if chosen == "1" and local_world_size > 1 and "nproc" not in args:
        chosen = ""  # torchrun sets it to 1 where nobody chose, which would leave most cores idle
    args.threads = int(chosen) if chosen.isdecimal() and 0 < int(chosen) < 2**15 else max(1, cores // local_world_size)


def _number(kind, least):
    """An argparse type: an int of at least this, or a float above it, below 2**63."""

    def parse(text):
        value = kind(text)
        if value < least or value == least and kind is float or not value < 2**63 - 1:
            raise ValueError
        return value

    parse.__name__ = f"whole number from {least} up" if kind is int else f"number above {least}"
    return parse
