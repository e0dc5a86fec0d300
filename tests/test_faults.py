"""Processes that die, and runs that are ended: nothing hangs, nothing is left, nothing is lost."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.processes import ROOT, losses, run_script
from tests.test_commands import COMMANDS, TORCHRUN, run


def wait_for(condition, seconds):
    """Whether condition() becomes true in time."""
    end = time.monotonic() + seconds
    while not (value := condition()) and time.monotonic() < end:
        time.sleep(0.02)
    return value


def family(session):
    """The living processes of a session, and of the sessions that torchrun gives its workers."""
    found, sessions = {}, {session}
    for _ in range(3):
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                pid, name, state, parent, group, own = re.match(
                    r"(\d+) \((.*)\) (\w) (\d+) (\d+) (\d+)", stat.read_text()
                ).groups()
                if state != "Z" and (int(own) in sessions or int(parent) in found):
                    found[int(pid)] = Path(f"/proc/{pid}/cmdline").read_bytes()
                    sessions.add(int(own))
    return found


@contextlib.contextmanager
def running(command, folder, *options, ignore_sigint=False):
    """A run of many epochs that has saved its first; yields it, its checkpoint and the processes that belong to it."""
    command = [*command, "--epochs", "1000", "--checkpoint", str(folder / "model.pt"), *map(str, options)]
    signal.signal(signal.SIGINT, signal.default_int_handler)  # where the tests were started with it ignored
    if ignore_sigint:  # as a shell does for its background jobs
        command = ["bash", "-c", 'trap "" INT; exec "$@"', "bash", *command]
    with open(folder / "log", "w") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, stdout=log, stderr=log,
            start_new_session=True,
        )  # fmt: skip
    members = {}
    try:
        assert wait_for(lambda: (folder / "model.pt").exists() or process.poll() is not None, 90)
        assert process.poll() is None, (folder / "log").read_text()
        members = family(process.pid)
        yield process, members
    finally:
        for pid in (process.pid, *members):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def gone(members):
    """Whether all these processes end within ten seconds."""

    def all_gone():
        living = []
        for pid in members:
            with contextlib.suppress(OSError):
                if ") Z " not in Path(f"/proc/{pid}/stat").read_text():
                    living.append(pid)
        return not living

    return wait_for(all_gone, 10)


def workers(members, script):
    """Those that train, without the process that started them."""
    spawned = b"spawn_main" if script == "ddp_mp_spawn.py" else b"-u\0ddp_torchrun.py"
    return [pid for pid, line in members.items() if spawned in line]


both = pytest.mark.parametrize("script", ["ddp_mp_spawn.py", "ddp_torchrun.py"])


@both
def test_when_a_process_is_killed_the_run_ends_and_nothing_is_left(script, tmp_path):
    with running(COMMANDS[script], tmp_path) as (process, members):
        two = workers(members, script)
        assert len(two) == 2
        os.kill(two[1], signal.SIGKILL)
        assert process.wait(40) == 1
        assert gone(members)
        assert "SIGKILL" in (tmp_path / "log").read_text()
    assert torch.load(tmp_path / "model.pt", weights_only=True)["epoch"] >= 1


@pytest.mark.parametrize("script", COMMANDS)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_process_that_was_started_ends_all_and_leaves_a_good_checkpoint(script, number, tmp_path):
    with running(COMMANDS[script], tmp_path) as (process, members):
        process.send_signal(number)
        assert process.wait(40) != 0
        assert gone(members)
    epoch = torch.load(tmp_path / "model.pt", weights_only=True)["epoch"]
    options = ["--epochs", epoch + 1, "--checkpoint", tmp_path / "model.pt"]
    assert len(losses(run_script(tmp_path, script, *options, nproc=2))) == 1


@pytest.mark.parametrize("ignored", [False, True])
def test_the_children_of_a_killed_parent_end_even_where_interrupts_are_ignored(ignored, tmp_path):
    with running(COMMANDS["ddp_mp_spawn.py"], tmp_path, ignore_sigint=ignored) as (process, members):
        assert len(workers(members, "ddp_mp_spawn.py")) == 2
        process.kill()
        assert gone(members)


def test_workers_that_outlive_a_killed_launcher_keep_the_next_run_from_their_checkpoint(tmp_path):
    with running(TORCHRUN, tmp_path) as (process, members):
        process.kill()
        process.wait()
        next_run = run(COMMANDS["single_gpu.py"], "--checkpoint", tmp_path / "model.pt")
        living = [pid for pid in workers(members, "ddp_torchrun.py") if Path(f"/proc/{pid}").exists()]
        assert len(living) == 2, "torchrun's workers live on"
        assert next_run.returncode == 2 and next_run.stderr.startswith("another run is writing")


def test_after_some_kills_the_run_ends_with_the_bits_of_an_untouched_one():
    command = "python tests/chaos.py --kills 3"
    assert f"\n{command}\n" in (ROOT / "README.md").read_text()
    result = run([sys.executable, *command.split()[1:]], seconds=300)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("3 kills (1 in start-up, 1 in an epoch, 1 in a save)")
    assert result.stdout.endswith("equal to the bit\n")
