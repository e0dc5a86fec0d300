"""What holds for all tests."""

import os
import signal

import pytest
import torch

os.environ["OMP_WAIT_POLICY"] = "passive"  # a thread that waits for others leaves its core to another process
os.environ.pop("OMP_NUM_THREADS", None)
os.environ.pop("PYTHONUNBUFFERED", None)  # or a line that was not flushed would be seen at once all the same
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
GPUS = torch.cuda.device_count()
SHOWN = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(GPUS))))
ROOT = os.path.dirname(os.path.dirname(__file__))
# For the tests of GPUs, in which float32 is not rounded to TF32. All others run on the CPU, over gloo.
WITH_GPUS = {"CUDA_VISIBLE_DEVICES": SHOWN, "NVIDIA_TF32_OVERRIDE": "0", "PYTHONPATH": ROOT}
os.environ["CUDA_VISIBLE_DEVICES"] = ""
newest = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 14), reason="older versions of PyTorch do otherwise"
)
