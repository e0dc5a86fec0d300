"""What only a GPU can show; skipped where there is none."""

import json
import sys

import pytest

from tests.conftest import GPUS, WITH_GPUS
from tests.processes import ROOT, TORCHRUN, edited, epochs_printed, run_command

pytestmark = pytest.mark.skipif(GPUS == 0, reason="no GPU")

# Run by each process after the shipped script: which devices it used, and how much of each.
WATCHED = """
import json, os, sys
sys.path.insert(0, {root!r})
import torch, ddp_torchrun
ddp_torchrun.main(sys.argv[1:])
used = [index for index in range(torch.cuda.device_count()) if torch.cuda.memory_reserved(index)]
with open({folder!r} + os.environ["RANK"], "w") as file:
    json.dump([torch.cuda.current_device(), used], file)
"""


def run(*command, status=0, **variables):
    result = run_command(*command, environment=WITH_GPUS | variables, seconds=300)
    assert result.returncode == status, result.stderr
    return result


def torchrun(nproc, *command):
    return run(*TORCHRUN[:-1], f"--nproc_per_node={nproc}", *command)


def test_one_device_trains_on_the_gpu():
    result = run(sys.executable, "single_gpu.py")
    name = run(sys.executable, "-c", "import torch; print(torch.cuda.get_device_name())").stdout.strip()
    assert name in result.stdout.splitlines()[0]
    assert epochs_printed(result.stdout)[-1][1] >= 98


@pytest.mark.parametrize("nproc", sorted({1, GPUS}))
def test_nccl_with_a_process_for_each_gpu_gives_the_result_of_one_device(nproc):
    if 48 % nproc:
        pytest.skip("48 images do not divide among these GPUs")
    single = epochs_printed(run(sys.executable, "single_gpu.py", "--epochs", "2").stdout)
    for result in (
        torchrun(nproc, "ddp_torchrun.py", "--epochs", "2"),
        run(sys.executable, "ddp_mp_spawn.py", "--nproc", str(nproc), "--epochs", "2"),
    ):
        assert len(epochs_printed(result.stdout)) == 2
        for (loss, accuracy), (one_loss, one_accuracy) in zip(epochs_printed(result.stdout), single, strict=True):
            assert loss == pytest.approx(one_loss, rel=0.01) and accuracy == pytest.approx(one_accuracy, abs=1.5)


@pytest.mark.skipif(GPUS < 2, reason="fewer than two GPUs")
def test_each_process_uses_its_own_gpu_and_no_other(tmp_path):
    (tmp_path / "watched.py").write_text(WATCHED.format(root=str(ROOT), folder=str(tmp_path / "rank")))
    torchrun(GPUS, str(tmp_path / "watched.py"), "--epochs", "1", "--batch-size", str(16 * GPUS))
    seen = [json.loads((tmp_path / f"rank{rank}").read_text()) for rank in range(GPUS)]
    assert seen == [[rank, [rank]] for rank in range(GPUS)]


def test_nothing_is_said_of_a_group_that_was_left_open(tmp_path):
    left_open = str(edited(tmp_path, "ddp_torchrun.py", ("    dist.destroy_process_group()\n", "")))
    for script, said in ("ddp_torchrun.py", False), (left_open, True):
        result = torchrun(1, script, "--epochs", "1")
        assert ("destroy_process_group() was not called" in result.stderr) == said


def test_one_process_more_than_there_are_gpus_is_refused():
    options = "--nproc", str(GPUS + 1), "--batch-size", str(48 * (GPUS + 1))
    result = run(sys.executable, "ddp_mp_spawn.py", *options, status=2)
    assert f"this machine shows {GPUS}" in result.stderr


def test_a_run_on_the_gpu_resumes_on_the_cpu(tmp_path):
    options = ["--checkpoint", str(tmp_path / "model.pt"), "--epochs"]
    run(sys.executable, "single_gpu.py", *options, "1")
    result = run(sys.executable, "single_gpu.py", *options, "2", CUDA_VISIBLE_DEVICES="")
    assert "after epoch 1" in result.stdout and len(epochs_printed(result.stdout)) == 1
