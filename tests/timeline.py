"""Draw one training step of each process on one time axis: how much of the exchange is hidden behind backward.

python tests/timeline.py [--model M] [--nproc N] [--batch-size B] [--bucket-cap-mb MB] [--chrome DIR] [--svg FILE]

A few steps run under torch.profiler with DistributedDataParallel, on random images of the digits' size, each after a
barrier, and the last is drawn. Backward ends with the last computation of a gradient: `loss.backward()` returns later,
for it waits for the exchange. The bar of an all-reduce includes the wait for the other ranks. On GPUs the bars are
kernels: NCCL's, and those that each part of the step has launched.
"""

import argparse
import json
import os
import re
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.distributed.nn  # before the group is made, see the scripts
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, record_function, schedule

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common.data import ImageSet
from common.errors import refuse
from common.model import build_model
from common.options import parse_args
from common.spawning import attached, spawning

PARTS = ["forward", "backward", "optimizer"]
WAIT = 2  # steps before the one in which the profiler warms up; the first lays the buckets out anew
WIDTH = 100  # columns of the drawing
SIGNS = {
    "computes": ("#", "computes"),
    "waits": (".", "waits for the rest of the exchange"),
    "exchanges": ("=", "all-reduce of a bucket"),
}
STYLE = """
text { font: 13px ui-monospace, Menlo, Consolas, monospace; fill: #1f2328; white-space: pre }
.ground { fill: #ffffff } .lane { fill: #eaeef2 }
.computes { fill: #0969da } .waits { fill: #a8c7ea } .exchanges { fill: #bc4c00 }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3 } .ground { fill: #0d1117 } .lane { fill: #21262d }
.computes { fill: #4493f8 } .waits { fill: #2a4a73 } .exchanges { fill: #f0883e }
}"""


def measure(rank, args, device):
    """Run the steps in the group of this process, and read the last.

    Returns:
        dict: what read() returns, and "buckets": the size of each in MiB, in the order in which they are exchanged.
    """
    torch.manual_seed(rank)
    share = args.batch_size // args.world_size
    data = ImageSet(torch.randint(256, (share, 1, 8, 8), dtype=torch.uint8), torch.randint(10, (share,)))
    images, labels = data.images.to(device), data.labels.to(device)
    model = build_model(args, data).to(device)
    cap = args.bucket_cap_mb or sum(parameter.nbytes for parameter in model.parameters()) / 2**20 / 6
    on_gpu = device.type == "cuda"
    ddp_model = DistributedDataParallel(model, device_ids=[device] if on_gpu else None, bucket_cap_mb=cap)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu
    with profile(activities=activities, schedule=schedule(wait=WAIT, warmup=1, active=1, repeat=1)) as trace:
        for _ in range(WAIT + 2):
            dist.barrier()
            with record_function("forward"):
                loss = F.cross_entropy(ddp_model(images), labels)
            optimizer.zero_grad()
            with record_function("backward"):
                loss.backward()
            with record_function("optimizer"):
                optimizer.step()
            if on_gpu:
                torch.cuda.synchronize()
            trace.step()
    if args.chrome:
        trace.export_chrome_trace(str(args.chrome / f"rank{rank}.json"))
    sizes = ddp_model._get_ddp_logging_data()["rebuilt_bucket_sizes"].split(", ")
    start = trace.profiler.kineto_results.trace_start_ns() / 1e6  # of the clock that the processes of a machine share
    return read(trace.events(), start) | {"buckets": [int(size) / 2**20 for size in sizes]}


def read(events, start=0.0):
    """Find the parts of a step among the events of the profiler.

    Args:
        events (list of FunctionEvent): their times are in microseconds from `start`, which is in milliseconds.
    Returns:
        dict: "forward", "backward", "optimizer": [start, end] in milliseconds; "exchanges": a list of such, in order.
    """

    def span(event):
        return [start + event.time_range.start / 1000, start + event.time_range.end / 1000]

    host = [event for event in events if event.device_type == torch.autograd.DeviceType.CPU]
    parts = {event.name: span(event) for event in host if event.name in PARTS}
    begin = parts["backward"][0]
    parts["backward"][1] = max(span(event)[1] for event in host if re.fullmatch(r"\w+Backward\d+", event.name))
    exchanges = [event for event in host if event.name == "gloo:all_reduce"]
    kernels = [event for event in events if event.activity_type in ("kernel", "gpu_memcpy", "gpu_memset")]
    if kernels:
        exchanges = [event for event in kernels if re.match(r"nccl\w*AllReduce", event.name)]
        launched = {event.id: span(event)[0] for event in host if event.linked_correlation_id == 0}
        work = [event for event in kernels if event not in exchanges]
        for part, (first, last) in parts.items():
            own = [span(event) for event in work if first <= launched.get(event.linked_correlation_id, 0) <= last]
            parts[part] = [min(begins for begins, _ in own), max(ends for _, ends in own)]
    return parts | {"exchanges": sorted(span(event) for event in exchanges if span(event)[0] >= begin)}


def on_one_axis(ranks):
    """What read() returned for each rank, with times from the first forward pass."""
    zero = min(step["forward"][0] for step in ranks)

    def shifted(times):
        return tuple(time - zero for time in times)

    return [
        step
        | {part: shifted(step[part]) for part in PARTS}
        | {"exchanges": tuple(shifted(times) for times in step["exchanges"])}
        for step in ranks
    ]


def hidden_share(exchanges, backward):
    """Of the time in which at least one exchange runs, the part that lies within backward: from 0 to 1."""
    total = hidden = reached = 0.0
    for start, end in sorted(exchanges):
        start, reached = max(start, reached), max(end, reached)
        total += reached - start
        hidden += max(0.0, min(reached, backward[1]) - max(start, backward[0]))
    return hidden / total


def rows(ranks):
    """Each row of the picture: (name of the rank or "", label, bars), where a bar is (a key of SIGNS, start, end)."""
    for rank, step in enumerate(ranks):
        yield f"rank {rank}", "forward", [("computes", *step["forward"])]
        end, done = step["backward"][1], max(end for _, end in step["exchanges"])
        yield "", "backward", [("computes", *step["backward"])] + [("waits", end, done)] * (done > end)
        for number, times in enumerate(step["exchanges"], 1):
            yield "", f"all-reduce {number}", [("exchanges", *times)]
        yield "", "optimizer", [("computes", *step["optimizer"])]


def sentences(ranks):
    """What the picture shows, a line a rank."""
    for rank, step in enumerate(ranks):
        start, end = step["backward"]
        began = min(1, (step["exchanges"][0][0] - start) / (end - start))
        hides = hidden_share(step["exchanges"], step["backward"])
        beginning = f"the first exchange began after {began:.0%} of backward"
        yield f"rank {rank}: {beginning}, which hides {hides:.0%} of the communication"


def draw(title, ranks):
    """The picture in characters.

    Args:
        title (list of str): what was run, in lines of at most WIDTH columns.
        ranks (list of dict): what read() returns for each rank, on one clock that starts with 0.
    Returns:
        str: lines of at most WIDTH columns.
    """
    total, width = max(step["optimizer"][1] for step in ranks), WIDTH - 43
    lines = [*title, "", f"{'0 ms':>27}{f'{total:.1f} ms':>{width - 4}}"]
    for rank, label, bars in rows(ranks):
        cells = [" "] * width
        for kind, start, end in bars:
            first = min(int(start / total * width), width - 1)
            last = max(first + 1, round(end / total * width))
            cells[first:last] = SIGNS[kind][0] * (last - first)
        lines.append(f"{rank:8}{label:14}|{''.join(cells)}|{bars[0][1]:7.1f} to {bars[0][2]:7.1f}")
    return "\n".join([*lines, "   ".join(map(" ".join, SIGNS.values())), "", *sentences(ranks)])


def draw_svg(title, ranks):
    """The same as a standalone SVG that follows the reader's light or dark scheme; arguments as for draw()."""
    total, left, width, y, parts = max(step["optimizer"][1] for step in ranks), 180, 600, 8, []

    def text(x, line):
        parts.append(f'<text x="{x}" y="{y}">{line}</text>')

    def bar(kind, x, length):
        parts.append(f'<rect class="{kind}" x="{x:.2f}" y="{y - 11}" width="{max(1, length):.2f}" height="14"/>')

    for line in title:
        y += 20
        text(16, line)
    for rank, label, bars in rows(ranks):
        y += 32 if rank else 20
        text(16, rank)
        text(76, label)
        bar("lane", left, width)
        for kind, start, end in bars:
            bar(kind, left + start / total * width, (end - start) / total * width)
        text(left + width + 12, f"{bars[0][1]:.1f} to {bars[0][2]:.1f} ms")
    y += 32
    for x, (kind, (_, meaning)) in zip((16, 126, 426), SIGNS.items(), strict=True):
        bar(kind, x, 14)
        text(x + 22, meaning)
    y += 12
    for line in sentences(ranks):
        y += 20
        text(16, line)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 960 {y + 16}" width="960" height="{y + 16}">'
    ground = '<rect class="ground" width="960" height="100%"/>'
    return "\n".join([head, f"<style>{STYLE}</style>", ground, *parts, "</svg>", ""])


def parse(argv):
    """Parse and check the options; those that the scripts share are checked as the scripts do it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    speaks = SimpleNamespace(speaks=True)
    parser.error = lambda message: refuse(speaks, f"{message}; --help shows the options")
    parser.add_argument("--model", choices=["cnn", "resnet18"], default="resnet18", help="network (default: resnet18)")
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    parser.add_argument("--nproc", default=max(2, gpus), help="processes (default: GPUs, at least 2)")
    parser.add_argument("--batch-size", default=48, help="images a step, all processes together (default: 48)")
    parser.add_argument("--bucket-cap-mb", type=float, help="size of a bucket in MiB (default: a sixth of the model)")
    parser.add_argument("--chrome", type=Path, metavar="DIR", help="write a trace a rank here, for ui.perfetto.dev")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="write the picture here as well")
    own = parser.parse_args(argv)
    shared = [f"--model={own.model}", f"--nproc={own.nproc}", f"--batch-size={own.batch_size}"]
    args = argparse.Namespace(**vars(own) | vars(parse_args(shared, world_size=None)))
    if args.world_size < 2:
        refuse(args, "one process has nothing to exchange; use --nproc 2 or more")
    if args.bucket_cap_mb is not None and not 0 < args.bucket_cap_mb < 2**20:
        refuse(args, f"--bucket-cap-mb {args.bucket_cap_mb} is not a size; use a number above 0, such as 25")
    if args.svg and (args.svg.is_dir() or not os.access(args.svg.parent, os.W_OK)):
        refuse(args, f"--svg {args.svg} cannot be written; name a file in a folder that exists")
    try:
        if args.chrome:
            args.chrome.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        refuse(args, f"--chrome {args.chrome} cannot be made ({error.strerror}); choose another folder")
    return args


def process(rank, args, port):
    """Join the group, measure, and leave the result in the store."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    backend, device_id = ("nccl", device) if on_gpu else ("gloo", None)
    if on_gpu:
        torch.cuda.set_device(device)
    torch.set_num_threads(args.threads)
    store = dist.TCPStore("127.0.0.1", port)
    dist.init_process_group(backend, store=store, rank=rank, world_size=args.world_size, device_id=device_id)
    store.set(f"rank {rank}", json.dumps(measure(rank, args, device)))
    dist.destroy_process_group()


def main(argv=None):
    args = parse(argv)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler would write of its progress to stderr
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with spawning():
        mp.spawn(attached(process), args=(args, store.port), nprocs=args.world_size)
    ranks = [json.loads(store.get(f"rank {rank}")) for rank in range(args.world_size)]
    ranks = on_one_axis(ranks)
    where, sizes = "GPU" if torch.cuda.is_available() else "CPU", [f"{size:#.3g}" for size in ranks[0]["buckets"]]
    title = [f"one step of {args.model}, {args.world_size} processes on {where}, global batch {args.batch_size}"]
    title += textwrap.wrap(f"gradients in buckets of {', '.join(sizes)} MiB", WIDTH)
    print(draw(title, ranks))
    if args.svg:
        args.svg.write_text(draw_svg(title, ranks))


if __name__ == "__main__":
    main()
