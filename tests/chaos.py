"""Kill the processes of a run again and again, and compare what it ends with to a run that nobody touched.

python tests/chaos.py --kills 100 [--seed S] [--nproc N]

The run is ddp_torchrun.py under torchrun --max-restarts. Each kill hits one process at a random moment of one of three
kinds: while the processes start, in an epoch (training or evaluation), and while rank 0 saves the checkpoint. Exit
status 0 only if all kills were made and the weights, and the state of the optimizer, are equal to the bit.
"""

import argparse
import collections
import contextlib
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
SECONDS = 120  # the longest wait for anything; what takes longer hangs


def command(args, checkpoint):
    """The run: enough epochs that it cannot end before the last kill, which lets at most two be finished."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={args.nproc}"]
    options = ["--epochs", str(3 + 2 * args.kills), "--batch-size", "240", "--checkpoint", str(checkpoint)]
    return [*launch, f"--max-restarts={args.kills}", str(ROOT / "ddp_torchrun.py"), *options]


@contextlib.contextmanager
def started(args, folder):
    """Start the run in a session of its own, of which nothing is left in the end."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    with open(folder / "log", "w") as log:
        run = subprocess.Popen(
            command(args, folder / "model.pt"), env=environment, stdout=log, stderr=log, start_new_session=True
        )
    workers = set()
    try:
        yield run, workers
    finally:
        for pid in (run.pid, *workers):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        run.wait()


def wait_for(what, condition, pause=0.01):
    """The first true value of condition(), or an error that says what did not happen."""
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(pause)
    raise TimeoutError(f"{what} took more than {SECONDS} seconds")


def ranks(run):
    """The process ids of the workers of the present attempt, by rank."""
    found = {}
    children = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split() if run.poll() is None else []
    for pid in map(int, children):
        with contextlib.suppress(OSError):
            for variable in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                if variable.startswith(b"RANK="):
                    found[int(variable[5:])] = pid
    return found


def stamp(path):
    with contextlib.suppress(FileNotFoundError):
        return path.stat().st_mtime_ns
    return 0


def wait_for_save(run, checkpoint, seconds=math.inf):
    """Wait until the checkpoint is replaced, or this long."""
    before, end = stamp(checkpoint), time.monotonic() + seconds
    wait_for("an epoch", lambda: stamp(checkpoint) != before or run.poll() is not None or time.monotonic() > end)


def kill(run, moment, checkpoint, workers, nproc, chance):
    """Wait for the workers of a new attempt, then for the moment, and kill one of them."""

    def complete():
        assert run.poll() is None, "the run ended before the last kill"
        now = ranks(run)
        return now if len(now) == nproc and not workers & set(now.values()) else None

    attempt = wait_for("a restart", complete)
    workers |= set(attempt.values())
    victim = attempt[chance.randrange(nproc)]
    if moment == "start-up":
        wait_for_save(run, checkpoint, chance.uniform(0, 5))
    else:
        wait_for_save(run, checkpoint)
        if moment == "an epoch":
            wait_for_save(run, checkpoint, chance.uniform(0, 0.5))
        else:
            temporary = checkpoint.with_name(f".{checkpoint.name}.tmp")
            wait_for("a save", lambda: temporary.exists() or run.poll() is not None, pause=0)
            victim = attempt[0]
    os.kill(victim, signal.SIGKILL)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--nproc", type=int, default=2)
    args = parser.parse_args(argv)
    if args.kills < 1 or args.nproc < 1:
        parser.error("--kills and --nproc are 1 or more")
    chance, moments, start = random.Random(args.seed), collections.Counter(), time.monotonic()
    with tempfile.TemporaryDirectory() as untouched, tempfile.TemporaryDirectory() as killed:
        untouched, killed = Path(untouched), Path(killed)
        with started(args, untouched) as (quiet, _), started(args, killed) as (run, workers):
            for number in range(args.kills):
                moment = ("start-up", "an epoch", "a save")[number % 3]
                kill(run, moment, killed / "model.pt", workers, args.nproc, chance)
                moments[moment] += 1
                print(f"kill {number + 1}/{args.kills} in {moment}", end="\r", file=sys.stderr, flush=True)
            assert run.wait(60 * SECONDS) == 0, (killed / "log").read_text()
            assert quiet.wait(60 * SECONDS) == 0, (untouched / "log").read_text()
        left = {path.name for path in killed.iterdir()}
        one, other = (torch.load(folder / "model.pt", weights_only=True) for folder in (untouched, killed))
    equal = all(torch.equal(one["model"][name], weight) for name, weight in other["model"].items())
    for index, state in one["optimizer"]["state"].items():
        equal &= torch.equal(state["momentum_buffer"], other["optimizer"]["state"][index]["momentum_buffer"])
    equal &= one["epoch"] == other["epoch"] and left == {"log", "model.pt"}
    counts = ", ".join(f"{count} in {moment}" for moment, count in moments.items())
    print(
        f"{args.kills} kills ({counts}), {one['epoch']} epochs on {args.nproc} processes, "
        f"{time.monotonic() - start:.0f} s: {'equal to the bit' if equal else 'DIFFERENT'}"
    )
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
