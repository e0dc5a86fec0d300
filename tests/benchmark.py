"""What DistributedDataParallel costs and brings on this machine: one command, one table.

python tests/benchmark.py [--quick] [--model M] [--dataset D] [--batch-size B] [--nproc N] [--rounds R]

Each loop has a process of its own, or N, that live as long as the benchmark and wait for orders on a pipe. A round asks
all of them, in random order, for a chunk of a few steps, so that a ratio compares chunks of the same minute; the table
shows the median and the quartiles of the ratios over the rounds. A chunk during which other programs took more than
LOST of the cores is repeated at the end of its round, and the least disturbed is kept.

The scripts run as shipped: of what their train() calls, the data and the report are replaced, and the loader pauses.
"""

import argparse
import collections
import importlib.util
import itertools
import logging
import multiprocessing
import os
import random
import re
import resource
import signal
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader, TensorDataset

from common.data import ImageSet
from common.errors import refuse
from common.model import build_model
from common.options import parse_args
from tests.processes import torchrun_numbers

SHAPES = {"digits": (1437, 1, 8, 8), "fashion-mnist": (60000, 1, 28, 28), "cifar10": (50000, 3, 32, 32)}
CORES = [f"cpu{core}" for core in sorted(os.sched_getaffinity(0))]
SECONDS = 0.8  # a chunk: Linux counts the time of a core in hundredths of a second
LOST = 0.04  # the share of the cores that others may take during a chunk
WAIT = 300  # seconds after which a process hangs
# glibc would give the memory of large activations back in each step of one process, and keep it in another, by chance.
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "2000000000", "MALLOC_TRIM_THRESHOLD_": "2000000000"}

context = multiprocessing.get_context("forkserver")


def table(nproc, quick=False):
    """The sections, by heading. A row: its name, what measures it, then (a row to compare it with, the reason), ..."""

    def ddp(data=ImageSet, **names):
        return Loop(partial(shipped, data=data, **names), many=True)

    children = 1 if quick else nproc
    one_step = ("--epochs", "1", "--batch-size", str(1437 // children * children))
    torchrun = ("-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={children}", "ddp_torchrun.py")
    optimizer = "import torch; torch.optim.SGD([torch.zeros(1, requires_grad=True)]); print(flush=True)"
    bucket_view = partial(DistributedDataParallel, gradient_as_bucket_view=True)
    training = [
        ("bare loop", Loop(bare), ("", "the limit of one process: batches cut beforehand")),
        ("single_gpu.py", Loop(partial(shipped, script="single_gpu")),
            ("bare loop", "the rest is the loader and the sums")),
        ("N bare loops", Loop(bare, many=True), ("bare loop", "the limit of N, which never talk")),
        ("ddp_torchrun.py", ddp(), ("N bare loops", "its efficiency"), ("single_gpu.py", "its speed-up"),
            ("DDP, PIL and ToTensor", "what whole batches bring")),
        ("DDP, PIL and ToTensor", ddp(by_pil), ("N bare loops", "the loader of most examples")),
        ("gradient_as_bucket_view", ddp(DistributedDataParallel=bucket_view), ("ddp_torchrun.py", "an option of DDP")),
        ("one all_reduce by hand", ddp(DistributedDataParallel=partial(by_hand, one_call)),
            ("ddp_torchrun.py", "after backward()")),
        ("an all_reduce a parameter", ddp(DistributedDataParallel=partial(by_hand, a_call_each)),
            ("ddp_torchrun.py", "after backward()")),
        ("one number by hand", ddp(DistributedDataParallel=partial(by_hand, one_number)),
            ("N bare loops", "what it costs to wait for each other")),
        ("accelerate", Loop(accelerate, many=True), ("ddp_torchrun.py", "the loop of its manual")),
        ("lightning_fabric", Loop(fabric, many=True), ("ddp_torchrun.py", "the loop of its manual")),
    ]  # fmt: skip
    loading = [
        ("indexing", Loop(indexing), ("", "one operation a batch, no loader")),
        ("ImageSet", Loop(partial(load, data=ImageSet)), ("indexing", "the loader of the scripts"),
            ("PIL and ToTensor", "what whole batches bring")),
        ("TensorDataset", Loop(partial(load, data=TensorDataset)), ("indexing", "single tensors, stacked")),
        ("PIL and ToTensor", Loop(partial(load, data=by_pil)), ("indexing", "the loader of most examples")),
    ]  # fmt: skip
    starting = [
        ("import torch", Command("-c", "import torch; print(flush=True)"), ("", "a new interpreter and nothing else")),
        ("and an optimizer", Command("-c", optimizer), ("import torch", "the first one imports torch._dynamo")),
        ("python single_gpu.py", Command("single_gpu.py", *one_step), ("import torch", "the whole start"),
            ("and an optimizer", "what is its own")),
        ("python ddp_mp_spawn.py", Command("ddp_mp_spawn.py", f"--nproc={children}", *one_step),
            ("import torch", "by the parent, then its children")),
        ("torchrun ddp_torchrun.py", Command(*torchrun, *one_step),
            ("import torch", "by torchrun, then its processes")),
    ]  # fmt: skip
    missing = [name for name in ("accelerate", "lightning_fabric") if not importlib.util.find_spec(name)]
    return {
        "Training, images/s": [row for row in training if row[0] not in missing],
        "Input pipeline, images/s": loading,
        "From the command to the first step, s": starting,
    }


# The loops, each in a process of its own and without end. job: args, images, labels, device, share (images a step of
# this process), and paced(batches), which between two batches pauses until the next order.


def bare(job):
    batches = zip(job.images.to(job.device).split(job.share), job.labels.to(job.device).split(job.share))
    batches = [batch for batch in batches if len(batch[1]) == job.share]
    train(*model_and_optimizer(job), job.paced(itertools.cycle(batches)))


def accelerate(job):
    from accelerate import Accelerator

    os.environ["OMP_NUM_THREADS"] = str(job.args.threads)
    accelerator = Accelerator(cpu=job.device.type == "cpu")
    model, optimizer, train_loader = accelerator.prepare(*model_and_optimizer(job), loader(job, ImageSet))
    train(model, optimizer, job.paced(endless(train_loader)), accelerator.backward)


def fabric(job):
    from lightning_fabric import Fabric

    logging.disable(logging.INFO)
    fabric = Fabric(accelerator=job.device.type, devices=job.args.world_size, strategy="ddp")
    fabric.launch()
    train_loader = fabric.setup_dataloaders(loader(job, ImageSet))
    train(*fabric.setup(*model_and_optimizer(job)), job.paced(endless(train_loader)), fabric.backward)


def model_and_optimizer(job):
    torch.set_num_threads(job.args.threads)
    model = build_model(job.args, ImageSet(job.images, job.labels)).to(job.device)
    return model, torch.optim.SGD(model.parameters(), job.args.lr, momentum=0.9)


def train(model, optimizer, batches, backward=torch.Tensor.backward):
    for images, labels in batches:
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        backward(loss)
        optimizer.step()


def shipped(job, script="ddp_torchrun", data=ImageSet, **names):
    """train() of a shipped script, with other data, and other values for names that it imports."""

    class PacedLoader(DataLoader):
        def __iter__(self):
            return job.paced(super().__iter__())

    script = importlib.import_module(script)
    sets = data(job.images, job.labels), ImageSet(job.images[:0], job.labels[:0])  # an evaluation takes no time
    names |= {"load_data": lambda args: sets, "DataLoader": PacedLoader, "report": lambda *_: None}
    for name, value in names.items():
        assert hasattr(script, name)
        setattr(script, name, value)
    script.train(job.args)


def by_hand(reduce, model, device_ids):
    """In place of DistributedDataParallel: the plain model, and reduce(gradients) before each step of the optimizer."""
    register_optimizer_step_pre_hook(lambda *_: reduce([parameter.grad for parameter in model.parameters()]))
    return model


def one_call(gradients):
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    a_call_each([flat])
    for gradient, part in zip(gradients, flat.split([gradient.numel() for gradient in gradients])):
        gradient.copy_(part.view_as(gradient))


def one_number(gradients):
    dist.all_reduce(torch.zeros(1, device=gradients[0].device))


def a_call_each(gradients):
    for gradient in gradients:
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()


def indexing(job):
    order = torch.randperm(len(job.labels))[: len(job.labels) // job.share * job.share].split(job.share)
    for _ in job.paced((job.images[part], job.labels[part]) for part in itertools.cycle(order)):
        pass


def load(job, data):
    for _ in job.paced(endless(loader(job, data))):
        pass


def loader(job, data):
    return DataLoader(data(job.images, job.labels), job.share, shuffle=True, drop_last=True)


def endless(batches):
    while True:
        yield from batches


def by_pil(images, labels):
    """torchvision's own class, without its files: it makes a PIL image and then a float tensor of each image."""
    from torchvision.datasets import CIFAR10, MNIST
    from torchvision.transforms import ToTensor

    kind, data = (CIFAR10, images.permute(0, 2, 3, 1).numpy()) if images.shape[1] == 3 else (MNIST, images[:, 0])
    dataset = kind.__new__(kind)
    dataset.data, dataset.targets = data, labels.tolist()
    dataset.transform, dataset.target_transform = ToTensor(), None
    return dataset


def work(connection, loop, argv, size, rank, nproc, port):
    """In a process: run a loop for ever, a chunk whenever the parent asks for one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    os.environ |= torchrun_numbers(rank, nproc) | {"MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "benchmark"}
    args = parse_args(argv, nproc, nproc, speaks=False)
    args.epochs, args.lr = sys.maxsize, 1e-4  # no end, and no infinite loss
    device = torch.device(f"cuda:{rank}" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    noise = torch.randint(256, (size // 100 + 1, *SHAPES[args.dataset][1:]), dtype=torch.uint8)
    job = SimpleNamespace(args=args, device=device, share=args.batch_size // nproc)
    job.images, job.labels = noise.repeat(100, 1, 1, 1)[:size], torch.randint(10, (size,))
    clock = chunks(connection, device.type == "cuda")

    def paced(batches):
        for batch in batches:
            next(clock)
            yield batch

    job.paced = paced
    try:
        loop(job)
    except (EOFError, BrokenPipeError):
        pass  # the parent is gone
    except (MemoryError, torch.OutOfMemoryError) as error:
        connection.send(f"{type(error).__name__}: {error}")


def chunks(connection, cuda):
    """Yield before each step; between two chunks report seconds, CPU seconds and peak bytes, and wait for an order."""
    report = None
    while True:
        connection.send(report)
        untimed, steps = connection.recv()
        cpu = time.process_time()
        for step in range(untimed + steps):
            if step == untimed:
                torch.cuda.synchronize() if cuda else None
                start = time.perf_counter()
            yield
        torch.cuda.synchronize() if cuda else None
        seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
        peak = torch.cuda.max_memory_allocated() if cuda else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        report = seconds, cpu, peak


class Loop:
    """Images/s of a loop in one process, or in N, of which the slowest counts."""

    def __init__(self, loop, many=False):
        self.loop, self.many, self.connections, self.processes = loop, many, [], []

    def start(self, options):
        self.steps, self.batch, nproc = 2, options.args.batch_size, options.args.world_size if self.many else 1
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for rank in range(nproc):
            here, there = context.Pipe()
            arguments = (there, self.loop, options.argv, options.size, rank, nproc, self.store.port)
            self.processes.append(context.Process(target=work, args=arguments, daemon=True))
            self.processes[-1].start()
            self.connections.append(here)
            there.close()

    def receive(self):
        """The report of each process; the first is None, when the loop is at its first step."""
        if not all(connection.poll(WAIT) for connection in self.connections):
            raise TimeoutError(f"no answer in {WAIT} s")
        reports = [connection.recv() for connection in self.connections]
        for report in reports:
            if isinstance(report, str):
                raise ChildProcessError(report)
        return reports

    def run(self):
        for connection in self.connections:
            connection.send((1, self.steps))
        seconds, cpu, peak = zip(*self.receive())
        self.mebibytes = max(peak) >> 20
        return self.steps * self.batch / max(seconds), sum(cpu)

    def calibrate(self):
        self.steps = max(2, round(SECONDS * self.run()[0] / self.batch))

    def end(self):
        for process in self.processes:
            process.kill()
            process.join()


class Command:
    """Seconds from the start of a command to its first line, which a script prints before the first step."""

    def __init__(self, *words):
        self.words = [sys.executable, *words]

    def run(self):
        before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "start_new_session": True}
        with subprocess.Popen(self.words, cwd=ROOT, text=True, **pipes) as process:
            try:
                process.stdout.readline()
                seconds = time.perf_counter() - start
                _, errors = process.communicate(timeout=WAIT)
            except BaseException:
                os.killpg(process.pid, signal.SIGKILL)
                raise
        if process.returncode:
            raise ChildProcessError(errors)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measure(measured, options):
    """The values of each row, one a round (of commands: every fourth round), and how many chunks met which fate."""
    loops = {name: row for name, row in measured.items() if isinstance(row, Loop)}
    samples, fates = collections.defaultdict(list), collections.Counter()
    plan = [list(loops if number % 4 else measured) for number in range(options.rounds)]
    cost = {name: SECONDS * 1.3 if name in loops else 6 for name in measured}  # seconds, for a start
    context.set_forkserver_preload(["torch._dynamo", "torchvision"])
    try:
        for prepare in lambda row: row.start(options), Loop.receive, *[Loop.calibrate] * (0 if options.quick else 2):
            for name, row in loops.items():
                show(f"start: {name}")
                prepare(row)
        while plan:
            queue, best = random.sample(plan[0], len(plan.pop(0))), {}
            repeats = 0 if options.quick else 2 * len(queue)
            while queue:
                left = sum(cost[name] for names in [queue, *plan] for name in names)
                name = queue.pop(0)
                show(f"round {options.rounds - len(plan)} of {options.rounds}, about {left:.0f} s left: {name}")
                start = time.monotonic()
                value, lost = watched(measured[name].run)
                cost[name] = time.monotonic() - start
                best[name] = min(best.get(name, (lost, value)), (lost, value))
                if lost > LOST and repeats:
                    repeats -= 1
                    fates["repeated"] += 1
                    queue.append(name)
                    wait_for_quiet()
            for name, (lost, value) in best.items():
                samples[name].append(value)
                fates.update(all=1, disturbed=lost > LOST)
    except (EOFError, ChildProcessError, TimeoutError, subprocess.TimeoutExpired) as error:
        show("")
        refuse(options, f"{name} ended with an error: {' '.join(str(error).split()[-40:]) or 'see above'}")
    finally:
        for row in loops.values():
            row.end()
    show("")
    return samples, fates


def watched(run):
    """The value of run(), and the share of the cores that other programs took meanwhile."""
    before, start = busy(), time.perf_counter()
    value, cpu = run()
    return value, (busy() - before - cpu) / (time.perf_counter() - start) / len(CORES)


def busy():
    """Seconds that the cores of this program have worked, for whomever."""
    lines = [line.split() for line in Path("/proc/stat").read_text().splitlines()]
    ticks = [int(words[place]) for words in lines if words[0] in CORES for place in (1, 2, 3, 6, 7, 8)]
    return sum(ticks) / os.sysconf("SC_CLK_TCK")


def wait_for_quiet(seconds=2):
    end, lost = time.monotonic() + seconds, 1
    while lost > LOST and time.monotonic() < end:
        _, lost = watched(lambda: (time.sleep(0.2), 0))


def show(text):
    print(f"\r{text:<90}\r", end="", file=sys.stderr, flush=True)


def parse(argv):
    """The options, checked as the scripts check theirs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--model", default="cnn", help="cnn or resnet18 (default: cnn)")
    parser.add_argument("--dataset", choices=SHAPES, default="fashion-mnist", help="whose number and size of images")
    parser.add_argument("--batch-size", default="128", help="images a step, all processes together (default: 128)")
    parser.add_argument("--nproc", help="N, the number of processes (default: GPUs, else 2)")
    parser.add_argument("--rounds", type=int, default=20, help="(default: 20)")
    parser.add_argument("--quick", action="store_true", help="one short round: does it work? The figures mean nothing")
    options = argparse.Namespace(speaks=True)
    parser.error = lambda message: refuse(options, f"{message}; --help shows the options")
    parser.parse_args(argv, options)
    options.argv = ["--dataset", options.dataset, "--model", options.model, "--batch-size", options.batch_size]
    nproc = [] if options.nproc is None else ["--nproc", options.nproc]
    options.args = parse_args([*options.argv, *nproc], world_size=None)
    options.size, batch = SHAPES[options.dataset][0], options.args.batch_size
    if options.rounds < 1:
        refuse(options, f"--rounds {options.rounds} measures nothing; use 1 or more")
    if batch > options.size:
        refuse(options, f"--batch-size {batch} is more than the {options.size} images; use a smaller one")
    if options.quick:
        options.rounds, options.size = 1, min(options.size, 20 * batch)
    return options


def describe(options):
    args, shape = options.args, SHAPES[options.dataset][1:]
    cpu = re.search(r"model name\s*: (.*)|$", Path("/proc/cpuinfo").read_text())[1] or os.uname().machine
    numbers = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    gpus = collections.Counter(torch.cuda.get_device_name(number) for number in numbers)
    parameters = sum(p.numel() for p in build_model(args, torch.zeros(1, 1, *shape)).parameters())
    hardware = [f"{len(CORES)} cores of {cpu}", *(f"{count} x {name}" for name, count in gpus.items())]
    print(f"{', '.join(hardware)}; torch {torch.__version__}")
    print(
        f"{args.model}: {parameters:,} parameters; {options.size:,} images of {'x'.join(map(str, shape))}; "
        f"global batch {args.batch_size}; N = {args.world_size} with {args.threads} of the cores each; "
        f"{options.rounds} round{'s' * (options.rounds > 1)}",
        flush=True,
    )


def compared(values, others):
    ratios = torch.tensor([value / other for value, other in zip(values, others, strict=True)])
    low, ratio, high = ratios.quantile(torch.tensor([0.25, 0.5, 0.75])).tolist()
    return f"{ratio:.3g}", f"{low:.3g} to {high:.3g}"


def main(argv=None):
    options = parse(argv)
    describe(options)
    sections = table(options.args.world_size, options.quick)
    measured = {name: source for rows in sections.values() for name, source, *_ in rows}
    try:
        samples, fates = measure(measured, options)
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    for heading, rows in sections.items():
        print(f"\n{heading:<37}{'MiB':>4}{'ratio':>9}  quartiles")
        for name, source, *comparisons in rows:
            median = statistics.median(samples[name])
            start = f"{name:<26}{median:>9,.{0 if median > 99 else 2}f}{getattr(source, 'mebibytes', ''):>6}"
            for against, reason in comparisons:
                ratio, quartiles = compared(samples[name], samples[against]) if against else ("", "")
                print(f"{start:<41}{ratio:>9}  {quartiles:<19}{f'of {against}: ' if against else ''}{reason}")
                start = ""
    print(
        "\nMiB: the peak memory of the largest process. Of other programs: "
        f"{fates['repeated']} chunks repeated, {fates['disturbed']} of {fates['all']} kept although disturbed"
    )


if __name__ == "__main__":
    os.environ |= KEEP_MEMORY
    main()
