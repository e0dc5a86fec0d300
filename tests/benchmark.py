"""What DistributedDataParallel costs and brings on this machine: one command, one table.

python tests/benchmark.py [--model M] [--batch-size B] [--nproc N] [--rounds R] [--seconds S]

Each loop has a process of its own, or N, which live as long as the benchmark and wait for orders on a pipe. A round
asks all of them, in random order, for a chunk of S seconds, so that a ratio compares chunks of the same minute; the
table shows the median and the quartiles of the ratios over R rounds. The scripts run as shipped: of what their train()
calls, the data and the report are replaced, and the batches wait for orders.
"""

import argparse
import importlib.util
import itertools
import logging
import math
import os
import random
import re
import signal
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader

from common import options
from common.data import ImageSet
from common.model import build_model
from common.report import exit_with_error
from tests.processes import context, torchrun_variables

SIZE = 60_000, 1, 28, 28  # of Fashion-MNIST
SECONDS = 300  # after which a process that does not answer hangs
# glibc would give the memory of large activations back in each step of one process, and keep it in another, by chance.
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "2000000000", "MALLOC_TRIM_THRESHOLD_": "2000000000"}


# The loops, each in a process of its own and without end. job: args, device, data, share (images a step of this
# process), and paced(batches), which waits for an order before each chunk of batches.


def bare(job):
    images, labels = (tensor.to(job.device).split(job.share) for tensor in job.data.tensors)
    batches = [batch for batch in zip(images, labels) if len(batch[1]) == job.share]
    train(*model_and_optimizer(job), job.paced(itertools.cycle(batches)))


def shipped(script, job, **names):
    script = importlib.import_module(script)
    names |= {"load_data": lambda *_: (job.data, ImageSet(*(tensor[:0] for tensor in job.data.tensors)))}
    names |= {"show_progress": lambda loader, *_: job.paced(loader)}
    names |= {"report_start": lambda *_: None, "report_epoch": lambda *_: None}
    for name, value in names.items():
        assert hasattr(script, name)
        setattr(script, name, value)
    script.train(job.args)


def reduced_by_hand(model):
    """In place of DistributedDataParallel: the plain model, and an all-reduce of each gradient after backward()."""
    register_optimizer_step_pre_hook(lambda *_: average([parameter.grad for parameter in model.parameters()]))
    return model


def average(gradients):
    for gradient in gradients:
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()


def accelerate(job):
    from accelerate import Accelerator

    os.environ["OMP_NUM_THREADS"] = str(torch.get_num_threads())
    accelerator = Accelerator(cpu=job.device.type == "cpu")
    model, optimizer, train_loader = accelerator.prepare(*model_and_optimizer(job), loader(job))
    train(model, optimizer, job.paced(endless(train_loader)), accelerator.backward)


def fabric(job):
    from lightning_fabric import Fabric

    logging.disable(logging.INFO)
    fabric = Fabric(accelerator=job.device.type, devices=job.args.nproc, strategy="ddp")
    fabric.launch()
    train_loader = fabric.setup_dataloaders(loader(job))
    train(*fabric.setup(*model_and_optimizer(job)), job.paced(endless(train_loader)), fabric.backward)


def model_and_optimizer(job):
    model = build_model(job.args.model, job.data).to(job.device)
    return model, torch.optim.SGD(model.parameters(), job.args.lr, momentum=0.9)


def loader(job):
    return DataLoader(job.data, job.share, shuffle=True, drop_last=True)


def endless(batches):
    while True:
        yield from batches


def train(model, optimizer, batches, backward=torch.Tensor.backward):
    for images, labels in batches:
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        backward(loss)
        optimizer.step()


# Name: the loop, whether it has N processes, what it is compared with, what the ratio is
LOOPS = {
    "bare loop": (bare, False, None, "batches cut beforehand, in one process"),
    "single_gpu.py": (partial(shipped, "single_gpu"), False, "bare loop", "the rest is the loader and the sums"),
    "N bare loops": (bare, True, "bare loop", "the ceiling of N, which never talk"),
    "ddp_torchrun.py": (partial(shipped, "ddp_torchrun"), True, "N bare loops", "its efficiency"),
    "an all-reduce a parameter": (
        partial(shipped, "ddp_torchrun", DistributedDataParallel=reduced_by_hand),
        True, "ddp_torchrun.py", "after backward(), by hand",
    ),
    "accelerate": (accelerate, True, "ddp_torchrun.py", "the loop of its manual"),
    "lightning_fabric": (fabric, True, "ddp_torchrun.py", "the loop of its manual"),
}  # fmt: skip


def work(connection, loop, args, rank, nproc, port):
    """In a process: run a loop for ever, a chunk whenever the parent asks for one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    os.environ |= torchrun_variables(rank, nproc, port) | {"TORCHELASTIC_RUN_ID": "benchmark"}
    options.set_threads(nproc)
    device = torch.device(f"cuda:{rank}" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    count, *shape = SIZE
    images = torch.randint(256, (count // 100, *shape), dtype=torch.uint8).repeat(100, 1, 1, 1)
    clock = chunks(connection, torch.cuda.synchronize if device.type == "cuda" else lambda: None)

    def paced(batches):
        for batch in batches:
            next(clock)
            yield batch

    data = ImageSet(images, torch.randint(10, (count,)))
    try:
        loop(SimpleNamespace(args=args, device=device, data=data, share=args.batch_size // nproc, paced=paced))
    except (EOFError, BrokenPipeError):
        pass  # the parent is gone


def chunks(connection, synchronize):
    """Yield before each step: wait for the number of steps, make one more before them, send the seconds they took."""
    seconds = None
    while True:
        connection.send(seconds)
        steps = connection.recv()
        yield
        synchronize()
        start = time.perf_counter()
        for _ in range(steps):
            yield
        synchronize()
        seconds = time.perf_counter() - start


class Loop:
    """Images/s of a loop in one process, or in N, of which the slowest counts."""

    def __init__(self, name, args):
        self.loop, self.many, *_ = LOOPS[name]
        self.name, self.args, self.steps, self.processes = name, args, 2, []

    def start(self):
        nproc = self.args.nproc if self.many else 1
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.connections, theirs = zip(*(context.Pipe() for _ in range(nproc)))
        for rank, connection in enumerate(theirs):
            arguments = (connection, self.loop, self.args, rank, nproc, self.store.port)
            self.processes.append(context.Process(target=work, args=arguments, daemon=True))
            self.processes[-1].start()
            connection.close()
        self.receive()

    def receive(self):
        """The seconds of each process; at first None, when the loop is at its first step."""
        if not all(connection.poll(SECONDS) for connection in self.connections):
            exit_with_error(f"{self.name} gave no answer in {SECONDS} s; start the benchmark again")
        try:
            return [connection.recv() for connection in self.connections]
        except EOFError:
            exit_with_error(f"{self.name} ended with the error above; use another --batch-size or --model")

    def run(self):
        for connection in self.connections:
            connection.send(self.steps)
        return self.steps * self.args.batch_size / max(self.receive())

    def calibrate(self, seconds):
        self.steps = max(2, round(seconds * self.run() / self.args.batch_size))

    def end(self):
        for process in self.processes:
            process.kill()
            process.join()


def measure(loops, rounds, seconds):
    """For each loop its images/s in each round."""
    samples = {name: [] for name in loops}
    try:
        for name, loop in loops.items():
            show(f"start: {name}")
            loop.start()
        for loop in [*loops.values()] * 2:  # the first time the steps are few
            loop.calibrate(seconds)
        for number in range(rounds):
            for name in random.sample(list(loops), len(loops)):
                show(f"round {number + 1} of {rounds}: {name}")
                samples[name].append(loops[name].run())
    finally:
        show("")
        for loop in loops.values():
            loop.end()
    return samples


def show(text):
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def compared(values, others):
    """The median and the quartiles of the ratios of two loops in the same rounds."""
    ratios = torch.tensor([value / other for value, other in zip(values, others, strict=True)])
    low, ratio, high = ratios.quantile(torch.tensor([0.25, 0.5, 0.75])).tolist()
    return f"{ratio:.2f} [{low:.2f}, {high:.2f}]"


def main(argv=None):
    about = {"description": __doc__.splitlines()[0], "epilog": "and --model, --batch-size, --nproc"}
    parser = argparse.ArgumentParser(**about, allow_abbrev=False)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=0.8, help="of a chunk")
    own, rest = parser.parse_known_args(argv)
    args = options.parse_args(["--batch-size", "128", *rest], local_world_size=None)
    if own.rounds < 1 or not 0 < own.seconds < math.inf:
        exit_with_error("--rounds and --seconds must be above 0; leave them out")
    args.epochs, args.lr, args.checkpoint = sys.maxsize, 1e-4, None  # no end, and no infinite loss
    names = [name for name in LOOPS if name not in ("accelerate", "lightning_fabric") or importlib.util.find_spec(name)]
    cpu = re.search(r"model name\s*: (.*)|$", Path("/proc/cpuinfo").read_text())[1] or os.uname().machine
    hardware = f"{len(os.sched_getaffinity(0))} cores of {cpu}"
    if torch.cuda.is_available():
        hardware = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    print(
        f"{hardware}; torch {torch.__version__}; {args.model}; {SIZE[0]:,} images of 28x28; "
        f"global batch {args.batch_size}; N = {args.nproc}; {own.rounds} rounds of {own.seconds:g} s",
        flush=True,
    )
    samples = measure({name: Loop(name, args) for name in names}, own.rounds, own.seconds)
    print(f"\n{'':26}{'images/s':>9}  ratio and quartiles")
    for name in names:
        _, _, against, meaning = LOOPS[name]
        ratio = f"{compared(samples[name], samples[against])} of {against}: " if against else ""
        print(f"{name:26}{statistics.median(samples[name]):9,.0f}  {ratio}{meaning}")


if __name__ == "__main__":
    os.environ |= KEEP_MEMORY
    main()
