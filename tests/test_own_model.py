"""The suite as a check of the reader's own model: in a copy of the repository whose model does not suit, it says so."""

import os
import re
import shutil
import subprocess
import sys

import pytest

from tests.processes import ROOT, edited, losses, run_script

LAYER = "nn.Conv2d(channels, 32, 3, padding=1), nn.GroupNorm(8, 32),"
MODELS = {
    "BatchNorm": LAYER.replace("nn.GroupNorm(8, 32)", "nn.BatchNorm2d(32)"),
    "dropout": f"{LAYER} nn.Dropout2d(0.1),",
    "unused parameters": f"Unused(), {LAYER}",
}
UNUSED = """

class Unused(nn.Identity):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
"""
TEST = "test_any_number_of_processes_reaches_what_one_device_reaches[ddp_torchrun.py-2]"


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """What the test of exactness says of each model."""

    def run(name):
        folder = tmp_path_factory.mktemp("copy")
        for part in "common", "tests":
            shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
        for script in ROOT.glob("*.py"):
            shutil.copy(script, folder)
        source = (ROOT / "common/model.py").read_text()
        assert source.count(LAYER) == 1
        imports = "import torch.nn as nn\n"
        source = source.replace(LAYER, MODELS[name]).replace(imports, f"import torch\n{imports}{UNUSED}")
        (folder / "common/model.py").write_text(source)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"tests/test_exactness.py::{TEST}"]
        environment = {**os.environ, "COLUMNS": "400"}  # or the summary is cut
        return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)

    return {name: run(name) for name in MODELS}


@pytest.mark.parametrize("name", ["BatchNorm", "dropout"])
def test_a_layer_that_depends_on_the_share_fails_with_the_reason_that_the_readme_shows(name, outcomes):
    assert outcomes[name].returncode == 1
    assert "tests/test_exactness.py -k what_one_device_reaches`" in (ROOT / "README.md").read_text()
    assert "what_one_device_reaches" in TEST
    [said] = re.findall(r"^E +AssertionError: (.*)$", outcomes[name].stdout, re.MULTILINE)
    assert f"> {said}" in (ROOT / "README.md").read_text().splitlines()


def test_images_of_single_precision_are_compared_in_double_precision(tmp_path):
    images = "train_set, test_set = sets = load_data(args)\n    for part in sets:\n        part.images = part.images.float()"
    runs = []
    for script, nproc in ("single_gpu.py", 1), ("ddp_torchrun.py", 2):
        path = edited(tmp_path, script, ("train_set, test_set = load_data(args)", images))
        runs.append(run_script(tmp_path, path, "--epochs", 1, "--batch-size", 240, nproc=nproc, float64=True))
        assert runs[-1].status == 0, runs[-1].stderr
    assert losses(runs[1]) == pytest.approx(losses(runs[0]), rel=1e-9)


def test_a_parameter_that_no_forward_pass_uses_fails_with_the_error_of_ddp(outcomes):
    result = outcomes["unused parameters"]
    assert result.returncode == 1
    assert "Expected to have finished reduction in the prior iteration" in result.stdout
