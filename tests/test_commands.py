"""The commands as a person types them: real processes, nothing loaded before, nothing replaced."""

import concurrent.futures
import multiprocessing
import os
import re
import shutil
import signal
import sys

import pytest
import torch.distributed as dist

from common.spawn import end_together
from tests.conftest import newest
from tests.processes import EPOCH, ROOT, TORCHRUN, edited, run_command, run_script, torchrun_variables


def test_what_end_together_changes_it_puts_back_and_it_ends_its_children_but_none_of_others():
    def state():
        return signal.getsignal(signal.SIGTERM), dict(os.environ)

    @end_together
    def main(argument):
        assert state()[0] != before[0] and os.environ["MASTER_ADDR"] == "127.0.0.1"
        for child in children:
            child.start()
        return argument

    with multiprocessing.get_context("fork").Pool(1) as others:
        before = state()
        children = [multiprocessing.get_context("fork").Process(target=signal.pause, daemon=True) for _ in range(2)]
        assert main("returned") == "returned" and state() == before
        assert not any(child.is_alive() for child in children)
        assert others.apply_async(int).get(20) == 0


def test_end_together_works_in_a_thread_where_no_signal_can_be_handled():
    with concurrent.futures.ThreadPoolExecutor() as threads:
        assert threads.submit(end_together(lambda: "done")).result() == "done"


def test_main_can_be_called_where_no_file_holds_it():
    """The function that the children run is found in its module."""
    program = 'from ddp_mp_spawn import main; main(["--epochs", "1"])'
    assert f"`{program}`" in (ROOT / "README.md").read_text()
    result = run_command(sys.executable, "-", text=f"{program}\nprint('and on')\n")
    assert result.returncode == 0, result.stderr
    assert re.search(EPOCH, result.stdout) and result.stdout.endswith("and on\n")


def test_a_function_defined_on_the_spot_cannot_be_spawned():
    """As in a notebook, where no file holds it."""
    start = "multiprocessing.get_context('spawn').Process(target=train).start()"  # as mp.spawn does
    result = run_command(sys.executable, "-c", f"import multiprocessing\ndef train(): pass\n{start}")
    assert "AttributeError: Can't get attribute 'train' on" in result.stderr


THREADS = """
import os, sys
sys.path.insert(0, {!r})
import ddp_torchrun
ddp_torchrun.main(["--epochs", "1"])
tasks = [open(f"/proc/self/task/{{task}}/comm").read() for task in os.listdir("/proc/self/task")]
print("threads of the group:", sum("gloo" in name for name in tasks))
"""


@newest
@pytest.mark.parametrize("early", [True, False])
def test_when_train_returns_the_threads_of_the_group_are_gone(early, tmp_path):
    """Without the early import they outlive the run, and abort the process where they meet the interpreter's end."""
    shutil.copytree(ROOT / "common", tmp_path / "common")
    shutil.copy(ROOT / "ddp_torchrun.py", tmp_path)
    launcher = tmp_path / "common/torchrun.py"
    source = launcher.read_text()
    launcher.write_text(source if early else re.sub("import torch.distributed.nn .*\n", "", source))
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    variables, program = torchrun_variables(0, 1, store.port), THREADS.format(str(tmp_path))
    result = run_command(sys.executable, "-c", program, environment=variables)
    assert ("threads of the group: 0" in result.stdout) == early, result.stdout + result.stderr


def test_a_process_that_dies_ends_the_run_with_an_error_and_its_own_traceback(tmp_path):
    """@record writes it down for torchrun's report."""
    line = "        seconds = time.perf_counter() - start\n"
    fault = (line, f"{line}        assert rank != 1, 'planted'\n")
    (tmp_path / "common").symlink_to(ROOT / "common")
    written = {"TORCHELASTIC_ERROR_FILE": str(tmp_path / "error")}
    for script, edits, recorded in (
        ("ddp_mp_spawn.py", [fault], False),
        ("ddp_torchrun.py", [fault, ("@record\n", "")], False),
        ("ddp_torchrun.py", [fault], True),
    ):
        run = run_script(tmp_path, edited(tmp_path, script, *edits), nproc=2, environment=written)
        assert run.status == 1 and "AssertionError: planted" in run.stderr and "epoch  2" not in run.stdout
        assert (tmp_path / "error").exists() == recorded
    result = run_command(*TORCHRUN, tmp_path / "ddp_torchrun.py")
    assert result.returncode == 1 and "traceback : Traceback" in result.stderr
