"""Processes that die, and runs that are ended: nothing hangs, nothing is left, nothing is lost."""

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch.multiprocessing import start_processes

from common.spawning import attached, spawning
from tests.processes import ROOT, SCRIPTS, context, losses, run_script, run_scripts
from tests.test_commands import EPOCH, TORCHRUN, run


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
def running(script, folder, ignore_sigint=False):
    """Two processes, for many epochs; yields the run, and a call that waits for its first save and returns all pids."""
    launch = [sys.executable] if script == "ddp_mp_spawn.py" else TORCHRUN[:-1]
    command = [*launch, str(ROOT / script), "--epochs", "1000", "--checkpoint", "model.pt"]
    if ignore_sigint:  # as a shell does for its background jobs
        command = ["bash", "-c", 'trap "" INT; exec "$@"', "bash", *command]
    with open(folder / "log", "w") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, start_new_session=True)
    members = {}

    def saved():
        assert wait_for(lambda: (folder / "model.pt").exists() or process.poll() is not None, 120)
        assert process.poll() is None, (folder / "log").read_text()
        members.update(family(process.pid))
        return members

    try:
        yield process, saved
    finally:
        for pid in (process.pid, *members, *family(process.pid)):
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
    spawned = b"spawn_main" if script == "ddp_mp_spawn.py" else b"-u\0" + str(ROOT / "ddp_torchrun.py").encode()
    return [pid for pid, line in members.items() if spawned in line]


def epoch_of(folder):
    return torch.load(folder / "model.pt", weights_only=True)["epoch"]


@pytest.mark.parametrize("script", SCRIPTS[1:])
def test_when_a_process_is_killed_the_run_ends_and_nothing_is_left(script, tmp_path):
    with running(script, tmp_path) as (process, saved):
        members = saved()
        two = workers(members, script)
        assert len(two) == 2
        os.kill(two[1], signal.SIGKILL)
        assert process.wait(60) == 1
        assert gone(members)
    assert "SIGKILL" in (tmp_path / "log").read_text()
    assert epoch_of(tmp_path) >= 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("script", SCRIPTS[1:])
def test_a_signal_to_the_process_that_was_started_ends_all_and_leaves_a_good_checkpoint(script, number, tmp_path):
    with running(script, tmp_path) as (process, saved):
        members = saved()
        assert re.search(f"\n{EPOCH}\n", (tmp_path / "log").read_text()), "a line is seen at once"
        process.send_signal(number)
        status = process.wait(60)
        assert status == 143 if (script, number) == ("ddp_mp_spawn.py", signal.SIGTERM) else status != 0
        assert gone(members)
    options = ["--epochs", epoch_of(tmp_path) + 1, "--checkpoint", tmp_path / "model.pt"]
    assert len(losses(run_script(tmp_path, script, *options, nproc=2))) == 1


def test_the_children_of_a_killed_parent_end_even_where_interrupts_are_ignored(tmp_path):
    with running("ddp_mp_spawn.py", tmp_path, ignore_sigint=True) as (process, saved):
        members = saved()
        assert len(workers(members, "ddp_mp_spawn.py")) == 2
        process.kill()
        assert gone(members)


def wait_where_python_handles_no_signal(rank, path):
    """In C, as for a GPU."""
    path.write_text(str(os.getpid()))
    mutex, lock = ctypes.create_string_buffer(64), ctypes.CDLL(None).pthread_mutex_lock
    lock(mutex), lock(mutex)


def spawn_one_that_waits(path):
    with spawning():
        start_processes(attached(wait_where_python_handles_no_signal), (path,), 1, start_method="fork")


def test_the_child_of_a_killed_parent_ends_in_a_call_that_does_not_return_too(tmp_path):
    parent = context.Process(target=spawn_one_that_waits, args=(tmp_path / "child",))
    parent.start()
    try:
        assert wait_for(lambda: (tmp_path / "child").exists() and (tmp_path / "child").read_text(), 60)
    finally:
        parent.kill()
        parent.join()
    child = int((tmp_path / "child").read_text())
    try:
        assert gone([child])
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


def test_children_whose_parent_is_killed_while_they_start_end_by_themselves(tmp_path):
    with running("ddp_mp_spawn.py", tmp_path) as (process, _):
        children = wait_for(lambda: len(workers(family(process.pid), "ddp_mp_spawn.py")) == 2 and family(process.pid), 60)
        process.kill()
        process.wait()
        assert wait_for(lambda: gone(children), 60), "they would wait five minutes for the store of their parent"


def test_workers_that_outlive_a_killed_launcher_keep_the_next_run_from_their_checkpoint(tmp_path):
    with running("ddp_torchrun.py", tmp_path) as (process, saved):
        members = saved()
        process.kill()
        process.wait()
        before = epoch_of(tmp_path)
        assert wait_for(lambda: epoch_of(tmp_path) > before, 60), "torchrun's workers live on"
        living = workers(members, "ddp_torchrun.py")
        assert len(living) == 2
        for pid in living:
            os.kill(pid, signal.SIGSTOP)  # with the lock, and without taking the cores
        commands = [(tmp_path, script, "--checkpoint", tmp_path / "model.pt") for script in SCRIPTS]
        next_runs = run_scripts(commands, nproc=2)
    for next_run in next_runs:
        assert next_run.status == 2 and next_run.stderr.startswith("another run is writing")
        assert next_run.stderr.count("\n") == 1


def test_after_some_kills_the_run_ends_with_the_bits_of_an_untouched_one():
    command = "python tests/chaos.py --kills 3"
    assert f"`{command}`" in (ROOT / "README.md").read_text()
    result = run([sys.executable, *command.split()[1:]], seconds=400)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("3 kills (1 in start-up, 1 in an epoch, 1 in a save)")
    assert result.stdout.endswith("equal to the bit\n")
