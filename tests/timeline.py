"""Draw one training step of each process on one time axis: which all-reduces backward hides.

python tests/timeline.py [--model M] [--nproc N] [--batch-size B] [--bucket-cap-mb MB]

A few steps run on the CPU under torch.profiler with DistributedDataParallel, on random images of the digits' size, each
after a barrier, and the last is drawn. Backward ends with the last computation of a gradient: `loss.backward()` returns
later, for it waits for the rest of the all-reduces. The bar of an all-reduce includes the wait for the other ranks.
"""

import argparse
import os
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import profile, record_function, schedule

from common.data import ImageSet
from common.model import build_model
from common.report import exit_with_error
from common.spawn import end_together, parse_args

PARTS = ["forward", "backward", "optimizer"]
WAIT = 2  # steps before the one in which the profiler warms up; the first lays the buckets out anew
WIDTH = 57  # columns of the time axis


def measure(rank, args):
    """Run the steps in the group of this process, and read the last.

    Returns:
        dict: what read() returns, and "buckets": the size of each in MiB, in the order in which they are sent.
    """
    torch.manual_seed(rank)
    size = args.batch_size // dist.get_world_size()
    images, labels = torch.randint(256, (size, 1, 8, 8), dtype=torch.uint8), torch.randint(10, (size,))
    model = build_model(args.model, ImageSet(images, labels))
    cap = args.bucket_cap_mb or sum(parameter.nbytes for parameter in model.parameters()) / 2**20 / 6
    ddp_model = DistributedDataParallel(model, bucket_cap_mb=cap)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    with profile(schedule=schedule(wait=WAIT, warmup=1, active=1, repeat=1)) as trace:
        for _ in range(WAIT + 2):
            dist.barrier()
            with record_function("forward"):
                loss = F.cross_entropy(ddp_model(images), labels)
            optimizer.zero_grad()
            with record_function("backward"):
                loss.backward()
            with record_function("optimizer"):
                optimizer.step()
            trace.step()
    sizes = ddp_model._get_ddp_logging_data()["rebuilt_bucket_sizes"].split(", ")
    start = trace.profiler.kineto_results.trace_start_ns() / 1e6  # of the clock that the processes of a machine share
    return read(trace.events(), start) | {"buckets": [int(size) / 2**20 for size in sizes]}


def read(events, start):
    """Find the parts of a step among the events of the profiler, whose times are microseconds from start.

    Returns:
        dict: "forward", "backward", "optimizer": (start, end) in milliseconds; "all-reduces": a list of such, in order.
    """

    def span(event):
        return start + event.time_range.start / 1000, start + event.time_range.end / 1000

    parts = {event.name: span(event) for event in events if event.name in PARTS}
    begin, _ = parts["backward"]
    parts["backward"] = begin, max(span(event)[1] for event in events if re.fullmatch(r"\w+Backward\d+", event.name))
    reduced = [span(event) for event in events if event.name == "gloo:all_reduce"]
    return parts | {"all-reduces": sorted(times for times in reduced if times[0] >= begin)}


def draw(title, steps):
    """The picture in characters, of each rank a row a part.

    Args:
        steps (list of dict): what read() returns for each rank, on one clock.
    """
    zero, end = min(step["forward"][0] for step in steps), max(step["optimizer"][1] for step in steps)
    lines = [title, f"{'0 ms':>27}{f'{end - zero:.1f} ms':>{WIDTH - 4}}"]
    for rank, step in enumerate(steps):
        waited = step["backward"][1], step["all-reduces"][-1][1]
        rows = {"forward": [("#", *step["forward"])], "backward": [("#", *step["backward"]), (".", *waited)]}
        rows |= {f"all-reduce {number}": [("=", *times)] for number, times in enumerate(step["all-reduces"], 1)}
        rows |= {"optimizer": [("#", *step["optimizer"])]}
        for label, bars in rows.items():
            cells = [" "] * WIDTH
            for sign, *times in bars:
                first, last = (round((time - zero) / (end - zero) * WIDTH) for time in times)
                first = min(first, WIDTH - 1)
                last = max(last, first + (sign != "."))
                cells[first:last] = sign * (last - first)
            name = f"rank {rank}" if label == "forward" else ""
            lines.append(f"{name:8}{label:14}|{''.join(cells)}".rstrip())
    return "\n".join([*lines, "# computes   . waits for the rest of the all-reduces   = all-reduces, one a bucket"])


def process(rank, args):
    """Join the group, measure, and on rank 0 draw what all have measured."""
    dist.init_process_group("gloo", init_method="spawn://", rank=rank, world_size=args.nproc)
    steps = [None] * args.nproc if rank == 0 else None
    dist.gather_object(measure(rank, args), steps)
    if rank == 0:
        sizes = ", ".join(f"{size:#.3g}" for size in steps[0]["buckets"])
        where = f"{args.nproc} processes, global batch {args.batch_size}"
        print(draw(f"{args.model}, {where}, buckets of {sizes} MiB", steps))
    dist.destroy_process_group()


@end_together
def main(argv=None):
    about = {"description": __doc__.splitlines()[0], "epilog": "and --model, --batch-size, --nproc"}
    parser = argparse.ArgumentParser(**about, allow_abbrev=False)
    parser.add_argument("--bucket-cap-mb", type=float, help="size of a bucket in MiB (default: a sixth of the model)")
    own, rest = parser.parse_known_args(argv)
    args = parse_args(["--model", "resnet18", *rest])
    if args.nproc < 2:
        exit_with_error("one process has nothing to reduce; use --nproc 2 or more")
    args.bucket_cap_mb = own.bucket_cap_mb
    mp.spawn(process, args=(args,), nprocs=args.nproc)


if __name__ == "__main__":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["KINETO_LOG_LEVEL"] = "99"  # the profiler would write of its progress to stderr
    main()
