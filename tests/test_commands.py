"""The commands as a person types them: real processes, nothing loaded before, nothing replaced."""

import contextlib
import os
import re
import signal
import subprocess
import sys

import pytest
import torch.distributed as dist

from tests.processes import ROOT, edited, run_script, torchrun_numbers

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "ddp_torchrun.py"]
COMMANDS = {
    "single_gpu.py": [sys.executable, "single_gpu.py"],
    "ddp_mp_spawn.py": [sys.executable, "ddp_mp_spawn.py"],
    "ddp_torchrun.py": TORCHRUN,
}
NN = "import torch.distributed.nn\n"
EPOCH = r"epoch +\d+/\d+  loss (\d\.\d{6})  test accuracy (\d\d\.\d\d%)  [\d,]+ images/s  eta \d+ s"


def run(command, *options, **how):
    """Run one command, see run_all."""
    return run_all([command], *options, **how)[0]


def run_all(commands, *options, cwd=ROOT, texts=None, environments=None, seconds=200):
    """Run commands at the same time on the CPU, each in a session of its own, of which nothing is left.

    Args:
        texts (list of str): what each reads from standard input.
        environments (list of dict): variables for each.
    Returns:
        list of subprocess.CompletedProcess
    """
    pipes = {name: subprocess.PIPE for name in ("stdin", "stdout", "stderr")}
    processes, results = [], []
    try:
        for command, variables in zip(commands, environments or [{}] * len(commands), strict=True):
            variables = {**os.environ, "CUDA_VISIBLE_DEVICES": "", **variables}
            command = [*command, *map(str, options)]
            processes.append(
                subprocess.Popen(command, cwd=cwd, env=variables, text=True, start_new_session=True, **pipes)
            )
        for process, text in zip(processes, texts or [None] * len(commands), strict=True):
            if text:  # all must have theirs before one is waited for
                process.stdin.write(text)
                process.stdin.close()
                process.stdin = None
        for process in processes:
            stdout, stderr = process.communicate(timeout=seconds)
            results.append(subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr))
        return results
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


PROGRAMS = {
    "main": "from ddp_mp_spawn import main\nmain(['--epochs', '1'])\nprint('and on')\n",
    "on the spot": "import torch.multiprocessing as mp\ndef train(rank): pass\nmp.spawn(train, nprocs=1)\n",
    "threads": """
import os, sys
sys.path[:0] = {}
import ddp_torchrun
ddp_torchrun.main(["--epochs", "1"])
tasks = [open(f"/proc/self/task/{{task}}/comm").read() for task in os.listdir("/proc/self/task")]
print("threads of the group:", sum("gloo" in name for name in tasks))
""",
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """What became of programs that no file holds, all run at the same time."""
    folder = tmp_path_factory.mktemp("edited")
    edited(folder, "ddp_torchrun.py", (NN, ""))
    threads = [PROGRAMS["threads"].format([str(place), str(ROOT)]) for place in (ROOT, folder)]
    ports = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in threads]
    alone = [torchrun_numbers(0, 1) | {"MASTER_PORT": str(store.port)} for store in ports]
    programs = {"main": PROGRAMS["main"], "with the line": threads[0], "without the line": threads[1]}
    commands, texts = [[sys.executable, "-"]] * 3, list(programs.values())
    commands.append([sys.executable, "-c", PROGRAMS["on the spot"]])
    results = run_all(commands, texts=[*texts, None], environments=[{}, *alone, {}])
    return dict(zip([*programs, "on the spot"], results, strict=True))


def test_main_can_be_called_where_no_file_holds_it(ended):
    """The function that the children run is found in its module."""
    result = ended["main"]
    assert result.returncode == 0, result.stderr
    assert re.search(EPOCH, result.stdout) and result.stdout.endswith("and on\n")


def test_a_function_defined_on_the_spot_cannot_be_spawned(ended):
    """As in a notebook, where no file holds it."""
    result = ended["on the spot"]
    assert result.returncode == 1 and "AttributeError: Can't get attribute 'train' on" in result.stderr


def test_when_train_returns_the_threads_of_the_group_are_gone(ended):
    """With the line gone they outlive the run, and abort the process where they meet the interpreter's end."""
    for name, threads in ("with the line", 0), ("without the line", 3):
        assert ended[name].stdout.splitlines()[-1] == f"threads of the group: {threads}", ended[name].stderr


def test_a_process_that_dies_ends_the_run_with_an_error_and_its_own_traceback(tmp_path):
    line = "        seconds = time.perf_counter() - start\n"
    fault = (line, f"{line}        assert rank != 1, 'planted'\n")
    (tmp_path / "common").symlink_to(ROOT / "common")
    torchrun = run([*TORCHRUN[:-1], str(edited(tmp_path, "ddp_torchrun.py", fault))])
    spawn = run_script(tmp_path, edited(tmp_path, "ddp_mp_spawn.py", fault), nproc=2)
    for status, result in (torchrun.returncode, torchrun), (spawn.status, spawn):
        assert status == 1
        assert "AssertionError: planted" in result.stderr
        assert "epoch  2" not in result.stdout
    # torchrun's report names the first to fail; without @record it says how to enable that
    assert "traceback : Traceback" in torchrun.stderr and "To enable traceback" not in torchrun.stderr
