"""Processes that die, and runs that are ended: nothing hangs, nothing is left, nothing is lost."""

import contextlib
import ctypes
import os
import re
import signal
import sys

import pytest
import torch
import torch.distributed as dist
from filelock import FileLock, Timeout
from torch.multiprocessing import start_processes

import common.spawn
from tests.processes import EPOCH, ROOT, SCRIPTS, TORCHRUN, run_command, run_script, started, wait_for


@contextlib.contextmanager
def running(script, folder):
    """Two processes, for many epochs, of which the first is saved; yields the process that was started."""
    launch = [sys.executable] if script == "ddp_mp_spawn.py" else TORCHRUN
    command = [*launch, ROOT / script, "--epochs", 1000, "--checkpoint", "model.pt"]
    with open(folder / "log", "w") as log, started(*command, cwd=folder, stdout=log, stderr=log) as process:
        assert wait_for(lambda: (folder / "model.pt").exists() or process.poll() is not None)
        assert process.poll() is None, (folder / "log").read_text()
        yield process


def workers(process, script):
    """Those that train, without the process that started them."""
    spawned = "spawn_main" if script == "ddp_mp_spawn.py" else f"-u {ROOT / 'ddp_torchrun.py'}"
    return [pid for pid, line in process.family().items() if spawned in line]


def gone(process):
    return wait_for(lambda: not process.family(), 10)


def epoch_of(folder):
    return torch.load(folder / "model.pt", weights_only=True)["epoch"]


@pytest.mark.parametrize("script", SCRIPTS[1:])
def test_when_a_process_is_killed_the_run_ends_and_nothing_is_left(script, tmp_path):
    with running(script, tmp_path) as process:
        two = workers(process, script)
        assert len(two) == 2
        os.kill(two[1], signal.SIGKILL)
        assert process.wait(60) == 1 and gone(process)
    assert "SIGKILL" in (tmp_path / "log").read_text() and epoch_of(tmp_path) >= 1


@pytest.mark.parametrize("script", SCRIPTS[1:])
def test_a_signal_to_the_process_that_was_started_ends_all_and_leaves_a_good_checkpoint(script, tmp_path):
    with running(script, tmp_path) as process:
        assert re.search(f"\n{EPOCH}\n", (tmp_path / "log").read_text()), "a line is seen at once"
        process.terminate()
        assert process.wait(60) == (143 if script == "ddp_mp_spawn.py" else 1) and gone(process)
    options = ["--epochs", epoch_of(tmp_path) + 1, "--checkpoint", tmp_path / "model.pt"]
    assert len(run_script(tmp_path, script, *options, nproc=2).losses) == 1


def wait_where_python_handles_no_signal(rank, folder):
    """In C, as for a GPU, in a child that has joined the group."""
    dist.init_process_group("gloo", init_method="spawn://", rank=rank, world_size=1)
    (folder / "joined").touch()
    mutex, lock = ctypes.create_string_buffer(64), ctypes.CDLL(None).pthread_mutex_lock
    lock(mutex), lock(mutex)


@common.spawn.end_together
def spawn_one_that_waits(folder):
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a shell has its background jobs ignore it
    start_processes(wait_where_python_handles_no_signal, (folder,), 1, start_method="fork")


def test_the_child_of_a_killed_parent_ends_in_a_call_that_does_not_return_too(tmp_path):
    program = f"import pathlib, tests.test_faults as here; here.spawn_one_that_waits(pathlib.Path({str(tmp_path)!r}))"
    with started(sys.executable, "-c", program) as process:
        assert wait_for((tmp_path / "joined").exists)
        process.kill()
        assert gone(process)


def test_children_whose_parent_is_killed_while_they_start_end_by_themselves(tmp_path):
    """They would wait for minutes for the store of their parent."""
    with started(sys.executable, "ddp_mp_spawn.py", "--epochs", 1000) as process:
        assert wait_for(lambda: len(workers(process, "ddp_mp_spawn.py")) == 2)
        process.kill()
        assert wait_for(lambda: not process.family(), 60)


def test_workers_that_outlive_a_killed_launcher_keep_the_next_run_from_their_checkpoint(tmp_path):
    with running("ddp_torchrun.py", tmp_path) as process:
        process.kill()
        process.wait()
        before = epoch_of(tmp_path)
        assert wait_for(lambda: epoch_of(tmp_path) > before), "torchrun's workers live on"
        living = workers(process, "ddp_torchrun.py")
        assert len(living) == 2
        with pytest.raises(Timeout):
            FileLock(tmp_path / ".model.pt.lock").acquire(timeout=0)


def test_after_some_kills_the_run_ends_with_the_bits_of_an_untouched_one():
    command = "python tests/chaos.py --kills 3"
    assert f"`{command}`" in (ROOT / "README.md").read_text()
    result = run_command(sys.executable, *command.split()[1:], seconds=400)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("3 kills (1 in start-up, 1 in an epoch, 1 in a save)")
    assert result.stdout.endswith("equal to the bit\n")
