"""Kill the processes of a run again and again, and compare what it ends with to a run that nobody touched.

python tests/chaos.py --kills 100 [--seed S] [--nproc N]

The run is ddp_torchrun.py under torchrun --max-restarts. Each kill hits one process at a random moment of one of three
kinds: while the processes start, in an epoch (training or evaluation), and while rank 0 saves the checkpoint. Exit
status 0 only if all kills were made and the weights, and the state of the optimizer, are equal to the bit.
"""

import argparse
import collections
import contextlib
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from tests.processes import ROOT, SECONDS, TORCHRUN, started, wait_for

MOMENTS = ["start-up", "an epoch", "a save"]


def start(args, folder):
    """The run: enough epochs that it cannot end before the last kill, which lets at most two be finished."""
    options = ["--epochs", 3 + 2 * args.kills, "--batch-size", 240, "--checkpoint", folder / "model.pt"]
    launch = [*TORCHRUN[:-1], f"--nproc_per_node={args.nproc}", f"--max-restarts={args.kills}"]
    log = (folder / "log").open("w")
    environment = {"CUDA_VISIBLE_DEVICES": ""}
    return started(*launch, ROOT / "ddp_torchrun.py", *options, environment=environment, stdout=log, stderr=log)


def ranks(run):
    """The process ids of the living workers by rank."""
    found = {}
    for pid in run.family():
        with contextlib.suppress(OSError):
            for variable in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                if variable.startswith(b"RANK="):
                    found[int(variable[5:])] = pid
    return found


def wait_for_save(run, checkpoint, seconds=SECONDS):
    """Wait until the checkpoint is replaced, or this long."""
    before = checkpoint.exists() and checkpoint.stat().st_mtime_ns
    wait_for(
        lambda: (checkpoint.exists() and checkpoint.stat().st_mtime_ns) != before or run.poll() is not None,
        seconds,
        0.005,
    )


def kill(run, moment, checkpoint, workers, nproc, chance):
    """Wait for the workers of a new attempt, then for the moment, and kill one of them."""

    def attempt():
        now = ranks(run)
        return run.poll() is None and len(now) == nproc and not workers & set(now.values()) and now

    now = wait_for(attempt)
    assert now, "the run ended before the last kill, or no attempt started"
    workers |= set(now.values())
    victim = now[chance.randrange(nproc)]
    wait_for_save(run, checkpoint, *([chance.uniform(0, 5)] if moment == "start-up" else []))
    if moment == "an epoch":
        wait_for_save(run, checkpoint, chance.uniform(0, 0.5))
    if moment == "a save":
        wait_for(lambda: checkpoint.with_name(f".{checkpoint.name}.tmp").exists() or run.poll() is not None, pause=0)
        victim = now[0]
    os.kill(victim, signal.SIGKILL)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--nproc", type=int, default=2)
    args = parser.parse_args(argv)
    if args.kills < 1 or args.nproc < 1:
        parser.error("--kills and --nproc are 1 or more")
    chance, moments, begin = random.Random(args.seed), collections.Counter(), time.monotonic()
    with tempfile.TemporaryDirectory() as untouched, tempfile.TemporaryDirectory() as killed:
        untouched, killed, workers = Path(untouched), Path(killed), set()
        with start(args, untouched) as quiet, start(args, killed) as run:
            for number in range(args.kills):
                moment = MOMENTS[number % 3]
                kill(run, moment, killed / "model.pt", workers, args.nproc, chance)
                moments[moment] += 1
                print(f"kill {number + 1}/{args.kills} in {moment}", end="\r", file=sys.stderr, flush=True)
            assert run.wait(60 * SECONDS) == 0, (killed / "log").read_text()
            assert quiet.wait(60 * SECONDS) == 0, (untouched / "log").read_text()
        left = {path.name for path in killed.iterdir()}
        one, other = (torch.load(folder / "model.pt", weights_only=True) for folder in (untouched, killed))
    equal = one["epoch"] == other["epoch"] and left == {"log", "model.pt"}
    equal &= all(torch.equal(one["model"][name], weight) for name, weight in other["model"].items())
    for index, state in one["optimizer"]["state"].items():
        equal &= torch.equal(state["momentum_buffer"], other["optimizer"]["state"][index]["momentum_buffer"])
    counts = ", ".join(f"{count} in {moment}" for moment, count in moments.items())
    print(
        f"{args.kills} kills ({counts}), {one['epoch']} epochs on {args.nproc} processes, "
        f"{time.monotonic() - begin:.0f} s: {'equal to the bit' if equal else 'DIFFERENT'}"
    )
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
