"""What DistributedDataParallel costs and brings on this machine: one command, one table.

python tests/benchmark.py [--model M] [--batch-size B] [--nproc N] [--images I] [--rounds R]

A row is a shipped script, with the lines replaced that ROWS shows, and random images in place of its data. Each round
runs all rows in random order, so that a ratio compares runs of the same minute: two epochs each, of which the second
counts. The table shows the median and the quartiles of the ratios over the rounds.
"""

import argparse
import importlib.util
import os
import random
import re
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from common.options import parse_args
from common.report import exit_with_error
from tests.processes import edited, run_script

# glibc would give the memory of large activations back in each step of one process, and keep it in another, by chance.
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "2000000000", "MALLOC_TRIM_THRESHOLD_": "2000000000"}
DATA = "train_set, test_set = load_data(args.dataset, args.data_root)"
RANDOM = """from common.data import ImageSet
    images, labels = torch.randint(256, ({0}, 1, 28, 28), dtype=torch.uint8), torch.randint(10, ({0},))
    train_set, test_set = ImageSet(images, labels), ImageSet(images[:16], labels[:16])"""
WRAPPER, BACKWARD = "ddp_model = DistributedDataParallel(model)", "loss.backward()"
BY_HAND = """loss.backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= world_size"""
ACCELERATE = """from accelerate import Accelerator
    os.environ["OMP_NUM_THREADS"] = str(torch.get_num_threads())
    framework = Accelerator(cpu=device.type == "cpu")
    ddp_model, optimizer, train_loader = framework.prepare(model, optimizer, train_loader)"""
FABRIC = """from lightning_fabric import Fabric
    framework = Fabric(accelerator=device.type, devices=world_size, strategy="ddp")
    framework.launch()
    ddp_model, optimizer = framework.setup(model, optimizer)
    train_loader = framework.setup_dataloaders(train_loader)"""
BY_FRAMEWORK = [
    ("DistributedSampler(train_set, seed=args.seed, drop_last=True)", "torch.utils.data.RandomSampler(train_set)"),
    ("sampler.set_epoch(epoch)", "pass"),
    (BACKWARD, "framework.backward(loss)"),
]
# Name: the script, what is replaced in it, the row it is compared with, what the ratio is
ROWS = {
    "single_gpu.py": ("single_gpu.py", [], None, ""),
    "no communication": ("ddp_torchrun.py", [(WRAPPER, "ddp_model = model")], "single_gpu.py", "the ceiling of N"),
    "ddp_torchrun.py": ("ddp_torchrun.py", [], "no communication", "its efficiency"),
    "an all-reduce a parameter": (
        "ddp_torchrun.py", [(WRAPPER, "ddp_model = model"), (BACKWARD, BY_HAND)],
        "ddp_torchrun.py", "after backward(), by hand",
    ),
    "accelerate": ("ddp_torchrun.py", [(WRAPPER, ACCELERATE), *BY_FRAMEWORK], "ddp_torchrun.py", "as in its manual"),
    "lightning_fabric": ("ddp_torchrun.py", [(WRAPPER, FABRIC), *BY_FRAMEWORK], "ddp_torchrun.py", "as in its manual"),
}  # fmt: skip


def run_row(name, images, nproc, options):
    """The images/s of the second epoch of a row."""
    script, edits, *_ = ROWS[name]
    with tempfile.TemporaryDirectory() as folder:
        path = edited(folder, script, (DATA, RANDOM.format(images)), *edits)
        run = run_script(folder, path, *options, "--epochs", 2, nproc=nproc)
    if run.status:
        exit_with_error(f"{name} ended with: {run.stderr.strip().splitlines()[-1]}; use other options")
    return float(re.findall(r"([\d,]+) images/s", run.stdout)[1].replace(",", ""))


def compared(values, others):
    """The median and the quartiles of the ratios of two rows in the same rounds."""
    ratios = torch.tensor([value / other for value, other in zip(values, others, strict=True)])
    low, ratio, high = ratios.quantile(torch.tensor([0.25, 0.5, 0.75])).tolist()
    return f"{ratio:.2f} [{low:.2f}, {high:.2f}]"


def main(argv=None):
    about = {"description": __doc__.splitlines()[0], "epilog": "and --model, --batch-size, --nproc"}
    parser = argparse.ArgumentParser(**about, allow_abbrev=False)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--images", type=int, default=2560, help="of an epoch")
    own, rest = parser.parse_known_args(argv)
    args = parse_args(["--batch-size", "128", *rest], local_world_size=None)
    options = ["--model", args.model, "--batch-size", args.batch_size]
    if own.rounds < 1 or own.images < 16:
        exit_with_error("--rounds must be above 0 and --images above 15; leave them out")
    names = [name for name in ROWS if name not in ("accelerate", "lightning_fabric") or importlib.util.find_spec(name)]
    cpu = re.search(r"model name\s*: (.*)|$", Path("/proc/cpuinfo").read_text())[1] or os.uname().machine
    hardware = f"{len(os.sched_getaffinity(0))} cores of {cpu}"
    if torch.cuda.is_available():
        hardware = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    print(
        f"{hardware}; torch {torch.__version__}; {args.model}; {own.images:,} images of 28x28; "
        f"global batch {args.batch_size}; N = {args.nproc}; {own.rounds} rounds",
        flush=True,
    )
    speeds = {name: [] for name in names}
    for number in range(own.rounds):
        for name in random.sample(names, len(names)):
            if sys.stderr.isatty():
                print(f"\r\x1b[Kround {number + 1}: {name}\r", end="", file=sys.stderr, flush=True)
            speeds[name].append(run_row(name, own.images, args.nproc, options))
    print(f"\n{'':26}{'images/s':>9}  ratio and quartiles")
    for name in names:
        *_, against, meaning = ROWS[name]
        ratio = f"{compared(speeds[name], speeds[against])} of {against}: " if against else ""
        print(f"{name:26}{statistics.median(speeds[name]):9,.0f}  {ratio}{meaning}")


if __name__ == "__main__":
    os.environ |= KEEP_MEMORY
    main()
