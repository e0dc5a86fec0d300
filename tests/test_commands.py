"""The commands as a person types them: real processes, nothing loaded before, nothing replaced."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys

import pytest

from tests.processes import ROOT, edited, losses, run_script

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


def run_all(commands, *options, cwd=ROOT, text=None, environment=None, seconds=100):
    """Run commands at the same time on the CPU, each in a session of its own, of which nothing is left.

    Returns:
        list of subprocess.CompletedProcess
    """
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", **(environment or {})}
    pipes = {name: subprocess.PIPE for name in ("stdin", "stdout", "stderr")}
    processes, results = [], []
    try:
        for command in commands:
            command = [*command, *map(str, options)]
            processes.append(
                subprocess.Popen(command, cwd=cwd, env=environment, text=True, start_new_session=True, **pipes)
            )
        for process in processes:
            stdout, stderr = process.communicate(text, timeout=seconds)
            results.append(subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr))
        return results
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """What each script prints in two epochs, run from another folder, and saves."""
    outputs = {}
    for script, command in COMMANDS.items():
        folder = tmp_path_factory.mktemp("elsewhere")
        command = [*command[:-1], str(ROOT / script)]
        result = run(command, "--epochs", 2, "--checkpoint", "model.pt", cwd=folder)
        assert result.returncode == 0, result.stderr
        assert {path.name for path in folder.iterdir()} == {"model.pt"}
        outputs[script] = result
    return outputs


def test_every_script_prints_a_line_at_the_start_one_an_epoch_and_where_the_model_is(printed):
    for script, result in printed.items():
        first, *epochs, last = result.stdout.splitlines()
        processes = "1 process on" if script == "single_gpu.py" else "2 processes on"
        assert first.startswith(processes)
        for fact in "1,437 training and 360 test images", "global batch 48", "58,634 parameters":
            assert fact in first
        assert len(epochs) == 2 and all(re.fullmatch(EPOCH, line) for line in epochs)
        assert last == "saved in model.pt"


def test_all_scripts_print_the_same_losses_and_accuracies(printed):
    seen = [re.findall(EPOCH, result.stdout) for result in printed.values()]
    for others in seen[1:]:
        for (loss, accuracy), (other_loss, other_accuracy) in zip(seen[0], others, strict=True):
            assert float(other_loss) == pytest.approx(float(loss), abs=1e-3)  # float32
            assert float(other_accuracy[:-1]) == pytest.approx(float(accuracy[:-1]), abs=0.6)  # two images


def test_a_run_that_goes_well_writes_nothing_to_stderr(printed):
    for script, result in printed.items():
        ours = [line for line in result.stderr.splitlines() if not re.search("run.py|OMP_NUM_THREADS|[*]{9}|^$", line)]
        assert ours == [], script  # what torchrun says of OMP_NUM_THREADS


def test_main_can_be_called_where_no_file_holds_it():
    """The function that the children run is found in its module."""
    program = "from ddp_mp_spawn import main\nmain(['--epochs', '1'])\nprint('and on')\n"
    result = run([sys.executable, "-"], text=program)
    assert result.returncode == 0, result.stderr
    assert re.search(EPOCH, result.stdout) and result.stdout.endswith("and on\n")


def test_a_function_defined_on_the_spot_cannot_be_spawned():
    """As in a notebook, where no file holds it."""
    program = "import torch.multiprocessing as mp\ndef train(rank): pass\nmp.spawn(train, nprocs=2)\n"
    result = run([sys.executable, "-c", program])
    assert result.returncode == 1 and "AttributeError: Can't get attribute 'train' on" in result.stderr


def test_when_train_returns_the_threads_of_the_group_are_gone(tmp_path):
    """With the line gone they outlive the run, and abort the process where they meet the interpreter's end."""
    driver = "import os, ddp_torchrun\nddp_torchrun.main(['--epochs', '1'])\n"
    driver += "tasks = [open(f'/proc/self/task/{task}/comm').read() for task in os.listdir('/proc/self/task')]\n"
    driver += "print('threads of the group:', sum('gloo' in name for name in tasks))\n"
    for name, threads in ("ddp_torchrun.py", 0), (edited(tmp_path, "ddp_torchrun.py", (NN, "")), 3):
        folders = [str((ROOT / name).parent), str(ROOT)]
        (tmp_path / "driver.py").write_text(f"import sys\nsys.path[:0] = {folders}\n{driver}")
        result = run([*TORCHRUN[:4], "--nproc_per_node=1", str(tmp_path / "driver.py")])
        assert result.stdout.splitlines()[-1] == f"threads of the group: {threads}", result.stderr


def test_two_agents_of_one_process_give_the_result_of_one_agent_of_two(tmp_path):
    """As on two machines, where each process is the first of its own."""
    together = run_script(tmp_path, "ddp_torchrun.py", "--epochs", 2, nproc=2)
    with socket.socket() as reserved:  # bound but not listening: nobody else gets this port, and the first agent may
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        address = ["--master_addr=127.0.0.1", f"--master_port={reserved.getsockname()[1]}"]
        options = ["--nnodes=2", "--nproc_per_node=1", *address]
        agents = [[*TORCHRUN[:3], *options, f"--node_rank={rank}", TORCHRUN[-1]] for rank in (0, 1)]
        first, second = run_all(agents, "--epochs", 2, environment={"OMP_NUM_THREADS": "1"})
    assert [first.returncode, second.returncode] == [0, 0], first.stderr + second.stderr
    for (loss, _), expected in zip(re.findall(EPOCH, first.stdout), losses(together), strict=True):
        assert float(loss) == pytest.approx(expected, abs=1e-4)
    assert second.stdout == "", "only rank 0 prints"


def test_a_process_that_dies_ends_the_run_with_an_error_and_its_own_traceback(tmp_path):
    for script in "ddp_mp_spawn.py", "ddp_torchrun.py":
        source = (ROOT / script).read_text()
        fault = "        seconds = time.perf_counter() - start\n        assert rank != 1, 'planted'\n"
        source = source.replace("        seconds = time.perf_counter() - start\n", fault)
        (tmp_path / script).write_text(source)
        (tmp_path / "common").symlink_to(ROOT / "common") if not (tmp_path / "common").exists() else None
        result = run(COMMANDS[script], cwd=tmp_path)
        assert result.returncode == 1
        assert "AssertionError: planted" in result.stderr and f"{script}" in result.stderr
        assert "epoch  2" not in result.stdout
        if script == "ddp_torchrun.py":  # the report names the first to fail; without @record it says how to enable it
            assert "traceback : Traceback" in result.stderr and "To enable traceback" not in result.stderr
