"""The README's commands for several machines, on two: network namespaces with a cable between them.

Where they cannot be made both machines are this one. What the tests change in a command: 8 processes are 1, epochs are
few and their steps too, waits are short, and where machines come and go the script stops until they have.
"""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.processes import ROOT, losses, run_script
from tests.test_commands import EPOCH

SECONDS = 200  # nothing that is waited for takes a tenth of this
HASTE = "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=8"
ENTER = ["nsenter", "--user", "--net", "--preserve-credentials", "--target"]
PROGRAMS = {
    "torchrun": f'echo "$*" >> torchruns; exec {sys.executable} -m torch.distributed.run "$@"',
    "scontrol": 'test "$*" = "show hostnames node[1-2]" && printf "%s\\n" 10.0.0.1 10.0.0.2',
    "srun": """
        while [[ $1 == -* ]]; do shift; done
        SLURM_NODEID=0 FIRST "$@" &
        SLURM_NODEID=1 SECOND "$@" &
        wait -n && wait -n || { kill $(jobs -p); wait; exit 1; }""",
}
# In double precision. One process stops at batch 13, in the third epoch; of two the last stops at batch 8, in the
# second epoch, or where it starts, if that is later, until the file `lost` exists.
STOPPING = f"""
import os, sys, time
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})
import torch
import torch.nn.functional as F
import ddp_torchrun

torch.set_default_dtype(torch.float64)
load_checkpoint, cross_entropy, batches = ddp_torchrun.load_checkpoint, F.cross_entropy, []
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

def counting_load_checkpoint(*args):
    first_epoch = load_checkpoint(*args)
    batches.extend([0] * 5 * first_epoch)
    return first_epoch

def stopping_cross_entropy(*args):
    batches.append(0)
    if rank == world_size - 1 and len(batches) >= {{1: 13, 2: 8}}[world_size]:
        Path(f"stopped{{world_size}}").touch()
        while world_size == 1 or not Path("lost").exists():
            time.sleep(0.02)
    return cross_entropy(*args)

ddp_torchrun.load_checkpoint, F.cross_entropy = counting_load_checkpoint, stopping_cross_entropy
ddp_torchrun.main()
"""


def shown(word):
    """The command of the README that holds this word."""
    blocks = re.findall(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    [command] = [block for block in blocks if word in block]
    return command


@contextlib.contextmanager
def network():
    """Yields what starts a command on each of two machines, and what is written there for words of the README.

    The namespaces have no names: they end with the processes in them, and those with this one.
    """
    with contextlib.ExitStack() as stack:
        try:
            first = stack.enter_context(holder("unshare", "--map-root-user", "--net"))
            second = stack.enter_context(holder(*ENTER, str(first), "unshare", "--net"))
            cable = f"ip link add eth0 type veth peer name eth0 netns {second}"
            for pid, address, command in (first, "10.0.0.1/24", cable), (second, "10.0.0.2/24", "true"):
                command = f"{command}; ip address add {address} dev eth0; ip link set eth0 up; ip link set lo up"
                subprocess.run([*ENTER, str(pid), "sh", "-ec", command], check=True, capture_output=True)
            on, words = [[*ENTER, str(first)], [*ENTER, str(second)]], {}
        except (OSError, subprocess.CalledProcessError):
            reserved = stack.enter_context(socket.socket())  # bound but not listening: no other may, but torchrun may
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            reserved.bind(("127.0.0.1", 0))
            words = {"29500": str(reserved.getsockname()[1]), "eth0": socket.if_nameindex()[0][1]}
            on, words = [[], []], words | {"10.0.0.1": "127.0.0.1", "10.0.0.2": "127.0.0.1"}
        yield on, words


@contextlib.contextmanager
def holder(*command):
    """A process in a new namespace, which ends when nobody holds its standard input."""
    process = subprocess.Popen([*command, "sh", "-c", "echo; exec cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    process.stdout.readline()
    try:
        yield process.pid
    finally:
        process.communicate()


class Machines:
    """Two machines that share a folder."""

    def __init__(self, folder, on, words):
        self.folder, self.on, self.words, self.running = folder, on, words, []
        for name, text in PROGRAMS.items():
            text = text.replace("FIRST", " ".join(on[0])).replace("SECOND", " ".join(on[1]))
            (folder / name).write_text(self.local(f"#!/bin/bash\n{text}\n"))
            (folder / name).chmod(0o755)

    def local(self, text):
        for old, new in self.words.items():
            text = text.replace(old, new)
        return text

    def start(self, command, machine=None, **environment):
        """Run bash's `command` on machine 0 or 1, or on neither, and return the process and the file it prints into."""
        environment |= {"PATH": f"{self.folder}:{os.environ['PATH']}", "GLOO_SOCKET_IFNAME": self.local("eth0")}
        environment |= {"OMP_NUM_THREADS": "1"}
        printed = self.folder / f"printed{len(list(self.folder.glob('printed*')))}"
        with open(printed, "w") as stdout, open(self.folder / "stderr", "a") as stderr:
            process = subprocess.Popen(
                [*([] if machine is None else self.on[machine]), "bash", "-c", self.local(command)],
                cwd=self.folder, env={**os.environ, **environment}, stdin=subprocess.DEVNULL, stdout=stdout,
                stderr=stderr, start_new_session=True,
            )  # fmt: skip
        self.running.append(process)
        return process, printed

    def lose(self, process):
        """Kill a process and all below it, as the loss of the machine would."""
        for pid in below(process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
        self.running.remove(process)

    def wait_for(self, condition):
        end = time.monotonic() + SECONDS
        while not condition():
            in_time = time.monotonic() < end and not any(process.poll() for process in self.running)
            assert in_time, (self.folder / "stderr").read_text()
            time.sleep(0.02)

    def wait_for_end(self):
        self.wait_for(lambda: all(process.poll() == 0 for process in self.running))


def below(pid):
    """A process and its children, their children, and so on: torchrun's have sessions of their own."""
    pids = [pid]
    with contextlib.suppress(OSError):
        for file in Path(f"/proc/{pid}/task").glob("*/children"):
            pids += [each for child in file.read_text().split() for each in below(int(child))]
    return pids


@contextlib.contextmanager
def machines(folder):
    """Two machines, on which nothing is left in the end."""
    with network() as (on, words):
        two = Machines(folder, on, words)
        try:
            yield two
        finally:
            for process in list(two.running):
                two.lose(process)


@pytest.fixture(scope="module", autouse=True)
def job(tmp_path_factory):
    """The Slurm job, which starts before the first test and goes on beside it."""
    with machines(tmp_path_factory.mktemp("slurm")) as two:
        script = shown("#SBATCH").replace("ddp_torchrun.py", f"{ROOT / 'ddp_torchrun.py'} --epochs 1 --batch-size 240")
        (two.folder / "job.sh").write_text(two.local(script))
        variables = {"NNODES": 2, "JOB_NODELIST": "node[1-2]", "GPUS_ON_NODE": 1, "CPUS_PER_TASK": 1}
        printed = two.start("bash job.sh", **{f"SLURM_{name}": str(value) for name, value in variables.items()})[1]
        yield two, printed


@pytest.fixture(scope="module")
def finished_job(job):
    """What the job printed, the arguments of each torchrun, and the command of the README as it is here."""
    two, printed = job
    two.wait_for_end()
    one_process = two.local(shown("--node_rank=0")).replace("--nproc_per_node=8", "--nproc_per_node=1")
    return printed.read_text().splitlines(), (two.folder / "torchruns").read_text().splitlines(), one_process


@pytest.fixture(scope="module")
def elastic(tmp_path_factory):
    """Two machines train; the second is lost in an epoch, the first goes on; in the next epoch another one comes.

    Returns:
        str, Path: what the first printed, the checkpoint.
    """
    with machines(tmp_path_factory.mktemp("elastic")) as two:
        (two.folder / "stopping.py").write_text(STOPPING)
        command = shown("--nnodes=1:2").replace("ddp_torchrun.py", "stopping.py --epochs 4 --batch-size 240")
        command = command.replace("--nproc_per_node=8", "--nproc_per_node=1").replace("is_host=1", f"is_host=1,{HASTE}")
        other = command.replace("is_host=1", "is_host=0").replace("--local_addr=10.0.0.1", "--local_addr=10.0.0.2")
        _, printed = two.start(command, machine=0)
        second, _ = two.start(other, machine=1)
        two.wait_for((two.folder / "stopped2").exists)
        (two.folder / "stopped1").unlink(missing_ok=True)  # where the second came late
        two.lose(second)
        (two.folder / "lost").touch()
        two.wait_for((two.folder / "stopped1").exists)
        two.start(other, machine=1)
        two.wait_for_end()
        yield printed.read_text(), two.folder / "model.pt"


def test_machines_that_come_and_go_change_the_number_of_processes(elastic):
    assert re.findall(r"^(\d) process", elastic[0], re.MULTILINE)[-3:] == ["2", "1", "2"]


def test_machines_that_come_and_go_leave_the_result_of_one_process_alone(elastic, tmp_path):
    printed, checkpoint = elastic
    options = ["--epochs", 4, "--batch-size", 240, "--checkpoint", tmp_path / "model.pt"]
    alone = run_script(tmp_path, "single_gpu.py", *options, float64=True)
    for (loss, _), expected in zip(re.findall(EPOCH, printed), losses(alone), strict=True):
        assert float(loss) == pytest.approx(expected, abs=1e-6)  # as printed
    weights, expected = (torch.load(file, weights_only=True)["model"] for file in (checkpoint, tmp_path / "model.pt"))
    torch.testing.assert_close(weights, expected, rtol=0, atol=1e-9)


def test_a_slurm_job_on_two_machines_gives_the_result_of_one_process(finished_job, tmp_path):
    first, *epochs, last = finished_job[0]
    assert first.startswith("2 processes on CPU") and last == "saved in model.pt"
    alone = run_script(tmp_path, "single_gpu.py", "--epochs", 1, "--batch-size", 240)
    for line, expected in zip(epochs, losses(alone), strict=True):
        assert float(re.fullmatch(EPOCH, line)[1]) == pytest.approx(expected, abs=1e-4)  # float32


def test_a_slurm_job_runs_the_command_shown_for_each_machine(finished_job):
    _, torchruns, command = finished_job
    ran = [{word for word in line.split() if "=" in word} for line in torchruns]
    for rank in 0, 1:
        options = {word for word in command.replace("--node_rank=0", f"--node_rank={rank}").split() if "=" in word}
        assert len(options) == 5 and options in ran
