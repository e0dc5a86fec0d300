"""The README's commands for several machines, on two: network namespaces with a cable between them.

What the tests change in a command: 8 processes are 1, epochs are few and their steps too, waits are short, and where
machines come and go the script stops until they have.
"""

import contextlib
import itertools
import os
import re
import signal
import subprocess
import sys

import pytest
import torch

from tests.conftest import newest
from tests.processes import ROOT, edited, epochs_printed, run_script, started, wait_for

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
# One process stops in the third step of the third epoch; of two the last stops in the third step of the second epoch,
# or of a later one in which it starts, until the file `lost` exists.
STOP = """optimizer.zero_grad()
            if rank == world_size - 1 and epoch >= 3 - world_size and totals[1] * world_size >= 2 * args.batch_size:
                Path(f"stopped{world_size}").touch()
                while world_size == 1 or not Path("lost").exists():
                    time.sleep(0.02)"""
DOUBLE = "import torch\nfrom pathlib import Path\ntorch.set_default_dtype(torch.float64)\n"


def shown(word):
    """The command of the README that holds this word, with one process a machine."""
    blocks = re.findall(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    [command] = [block for block in blocks if word in block]
    return command.replace("--nproc_per_node=8", "--nproc_per_node=1")


@contextlib.contextmanager
def holder(*command):
    """A process in a new network namespace, which ends when nobody holds its standard input."""
    command = [*command, "sh", "-c", "echo; exec cat"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        yield process.pid
        process.stdin.close()


class Machines:
    """Two machines that share a folder, and what is written on them for words of the README."""

    def __init__(self, folder, stack):
        self.folder, self.stack, self.running = folder, stack, []
        if subprocess.run(["unshare", "--map-root-user", "--net", "true"], capture_output=True).returncode:
            pytest.skip("no network namespaces")
        first = stack.enter_context(holder("unshare", "--map-root-user", "--net"))
        second = stack.enter_context(holder(*ENTER, str(first), "unshare", "--net"))
        self.on = [[*ENTER, str(first)], [*ENTER, str(second)]]
        cable = f"ip link add eth0 type veth peer name eth0 netns {second}"
        for on, address, command in zip(self.on, ("10.0.0.1/24", "10.0.0.2/24"), (cable, "true"), strict=True):
            command = f"{command}; ip address add {address} dev eth0; ip link set eth0 up; ip link set lo up"
            subprocess.run([*on, "sh", "-ec", command], check=True)
        for name, text in PROGRAMS.items():
            text = text.replace("FIRST", " ".join(self.on[0])).replace("SECOND", " ".join(self.on[1]))
            (folder / name).write_text(f"#!/bin/bash\n{text}\n")
            (folder / name).chmod(0o755)

    def start(self, command, machine=None, **environment):
        """Run bash's `command` on machine 0 or 1, or on neither: the process, with the file it prints into."""
        environment |= {"PATH": f"{self.folder}:{os.environ['PATH']}", "GLOO_SOCKET_IFNAME": "eth0"}
        words = [*([] if machine is None else self.on[machine]), "bash", "-c", command]
        printed = self.folder / f"printed{len(self.running)}"
        files = {"stdout": printed.open("w"), "stderr": (self.folder / "stderr").open("a")}
        environment |= {"OMP_NUM_THREADS": "1"}
        process = self.stack.enter_context(
            started(*words, cwd=self.folder, environment=environment, stdin=subprocess.DEVNULL, **files)
        )
        process.printed = printed
        self.running.append(process)
        return process

    def lose(self, process):
        """Kill a process and all that it has started, as the loss of the machine would."""
        for pid in process.family():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
        self.running.remove(process)

    def wait_for(self, condition):
        assert wait_for(lambda: condition() or any(process.poll() for process in self.running)) is True, (
            self.folder / "stderr"
        ).read_text()

    def wait_for_end(self):
        self.wait_for(lambda: all(process.poll() == 0 for process in self.running))


@contextlib.contextmanager
def machines(folder):
    """Two machines, on which nothing is left in the end."""
    with contextlib.ExitStack() as stack:
        yield Machines(folder, stack)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """Two Slurm jobs at once on the same two machines: what each printed, and the options of each torchrun."""
    with machines(tmp_path_factory.mktemp("slurm")) as two:
        script = shown("#SBATCH").replace("ddp_torchrun.py", f"{ROOT / 'ddp_torchrun.py'} --epochs 1 --batch-size 240")
        (two.folder / "job.sh").write_text(script)
        for number in 1, 2:
            variables = dict(NNODES=2, JOB_NODELIST="node[1-2]", GPUS_ON_NODE=1, CPUS_PER_TASK=1, JOB_ID=number)
            two.start("bash job.sh", **{f"SLURM_{name}": str(value) for name, value in variables.items()})
        two.wait_for_end()
        printed = [process.printed.read_text() for process in two.running]
        yield printed, (two.folder / "torchruns").read_text().splitlines()


@pytest.fixture(scope="module")
def elastic(tmp_path_factory):
    """Two machines train; the second is lost in an epoch, the first goes on; in the next epoch another one comes.

    Returns:
        str, Path: what the first printed, the checkpoint.
    """
    with machines(tmp_path_factory.mktemp("elastic")) as two:
        edited(two.folder, "ddp_torchrun.py", ("import torch\n", DOUBLE), ("optimizer.zero_grad()", STOP))
        (two.folder / "common").symlink_to(ROOT / "common")
        command = shown("--nnodes=1:2").replace("ddp_torchrun.py", "ddp_torchrun.py --epochs 4 --batch-size 240")
        command = command.replace("is_host=1", f"is_host=1,{HASTE}")
        other = command.replace("is_host=1", "is_host=0").replace("--local_addr=10.0.0.1", "--local_addr=10.0.0.2")
        first, second = two.start(command, machine=0), two.start(other, machine=1)
        two.wait_for((two.folder / "stopped2").exists)
        (two.folder / "stopped1").unlink(missing_ok=True)  # where the second came late
        two.lose(second)
        (two.folder / "lost").touch()
        two.wait_for((two.folder / "stopped1").exists)
        two.start(other, machine=1)
        two.wait_for_end()
        yield first.printed.read_text(), two.folder / "model.pt"


@newest
def test_machines_that_come_and_go_change_the_number_of_processes(elastic):
    assert re.findall(r"^(\d) process", elastic[0], re.MULTILINE)[-3:] == ["2", "1", "2"]


@newest
def test_machines_that_come_and_go_leave_the_result_of_one_process_alone(elastic, tmp_path):
    printed, checkpoint = elastic
    options = ["--epochs", 4, "--batch-size", 240, "--checkpoint", tmp_path / "model.pt"]
    alone = run_script(tmp_path, "single_gpu.py", *options, float64=True)
    assert [loss for loss, _ in epochs_printed(printed)] == pytest.approx(alone.losses, abs=1e-6)  # as printed
    weights, expected = (torch.load(file, weights_only=True)["model"] for file in (checkpoint, tmp_path / "model.pt"))
    torch.testing.assert_close(weights, expected, rtol=0, atol=1e-9)


def test_two_slurm_jobs_at_once_on_the_same_two_machines_give_the_result_of_one_process(jobs, tmp_path):
    alone = run_script(tmp_path, "single_gpu.py", "--epochs", 1, "--batch-size", 240)
    for number, printed in enumerate(jobs[0], 1):
        assert printed.startswith("2 processes on CPU") and printed.endswith(f"saved in job{number}.pt\n")
        assert [loss for loss, _ in epochs_printed(printed)] == pytest.approx(alone.losses, abs=1e-4)  # float32


def test_a_slurm_job_runs_the_command_shown_for_each_machine(jobs):
    ran = [{word for word in line.split() if "=" in word} for line in jobs[1]]
    for rank, number in itertools.product((0, 1), (1, 2)):
        command = shown("--node_rank=0").replace("--node_rank=0", f"--node_rank={rank}")
        options = {word for word in command.replace("29500", f"2000{number}").split() if "=" in word}
        assert len(options) == 5 and options in ran
