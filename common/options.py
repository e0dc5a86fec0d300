"""The command line, the same for all scripts, and a process's share of the CPU's cores."""

import argparse
import os
from pathlib import Path

import torch

from common import report
from common.report import exit_with_error


def parse_args(argv=None, local_world_size=1):
    """Parse and check the options, exit with one line if they are wrong, and set the threads of this process.

    local_world_size: processes of the run on this machine; None: the option --nproc says how many.
    """
    as_path = lambda text: Path(os.path.expanduser(text))  # noqa: E731  (a shell leaves the ~ of --checkpoint=~/m.pt)
    parser = argparse.ArgumentParser(
        description="Train an image classifier; the number of processes does not change the result.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--dataset", choices=["digits", "fashion-mnist", "cifar10"], default="digits", help="images")
    parser.add_argument("--data-root", type=as_path, default=Path("data"), help="folder of the downloaded data sets")
    parser.add_argument("--model", choices=["cnn", "resnet18"], default="cnn", help="network")
    parser.add_argument("--epochs", type=_number(int, 1), default=10, help="passes over the training images")
    parser.add_argument("--batch-size", type=_number(int, 1), default=48, help="images a step, all processes together")
    parser.add_argument("--lr", type=_number(float, 1e-30), default=0.02, help="learning rate")
    parser.add_argument("--seed", type=_number(int, 0), default=0, help="of the weights and the order of the images")
    parser.add_argument("--checkpoint", type=as_path, metavar="PATH", help="saved every epoch, resumed if it exists")
    if local_world_size is None:
        nproc = torch.cuda.device_count() if torch.cuda.is_available() else 2
        parser.add_argument("--nproc", type=_number(int, 1), default=nproc, help="processes to start")
    parser.error = lambda message: exit_with_error(f"{message}; --help shows the options")
    parser.print_help = parser.print_help if report.rank == 0 else lambda: None
    args = parser.parse_args(argv)
    if "TORCHELASTIC_RUN_ID" in os.environ and os.environ["WORLD_SIZE"] != str(report.world_size):
        report.rank = int(os.environ["RANK"])
        way_out = "give it ddp_torchrun.py, or start this script with python"
        exit_with_error(f"torchrun's processes would each train alone; {way_out}")
    world_size = report.world_size if local_world_size else args.nproc
    if args.batch_size % world_size:
        below = max(args.batch_size // world_size, 1) * world_size
        sizes = f"{below} and {below + world_size} do"
        exit_with_error(f"--batch-size {args.batch_size} does not divide among {world_size} processes; {sizes}")
    processes, gpus = local_world_size or args.nproc, torch.cuda.device_count()
    if torch.cuda.is_available() and processes > gpus:
        way_out = f"start at most {gpus}, or set CUDA_VISIBLE_DEVICES= (empty) to run on the CPU"
        exit_with_error(f"{processes} processes need as many GPUs, this machine shows {gpus}; {way_out}")
    set_threads(processes)
    return args


def set_threads(processes):
    """Let torch use OMP_NUM_THREADS threads, or else the cores that are left to each of so many processes."""
    omp = os.environ.get("OMP_NUM_THREADS", "")
    cores = min(getattr(os, "process_cpu_count", os.cpu_count)(), _cgroup_limit())  # the former from Python 3.13
    if hasattr(os, "sched_getaffinity"):
        cores = min(cores, len(os.sched_getaffinity(0)))
    torch.set_num_threads(int(omp) if omp.isdecimal() and 0 < int(omp) < 2**15 else max(1, int(cores // processes)))


def _cgroup_limit(root="/"):
    """The cores that this process's control groups allow, as docker --cpus sets them; infinite without a limit."""
    # https://docs.kernel.org/admin-guide/cgroup-v2.html, https://docs.kernel.org/scheduler/sched-bwc.html
    limit, groups = float("inf"), Path(root, "proc/self/cgroup")
    for line in groups.read_text().splitlines() if groups.exists() else []:
        _, controllers, group = line.split(":", 2)  # no controllers: version 2, with one file; else version 1, with two
        own = Path(root, "sys/fs/cgroup", controllers, group.lstrip("/"))
        for folder in [own, *own.parents]:  # the strictest counts
            files = [folder / name for name in ("cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us")]
            quota, *period = " ".join(file.read_text() for file in files if file.exists()).split() or ["max"]
            if quota not in ("max", "-1"):
                limit = min(limit, int(quota) / int(period[0]))
    return limit


def _number(kind, least):
    def number(text):
        if not least <= (value := kind(text)) < 2**63 - 1:
            raise ValueError
        return value

    number.__name__ = f"whole number from {least} up" if kind is int else "number above 0"  # in argparse's message
    return number
