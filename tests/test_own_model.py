"""The suite as a check of the reader's own model: where it does not suit, the test of exactness says so, and why."""

import pytest

from tests import test_exactness
from tests.processes import ROOT, edited, losses, run_script

exactness = test_exactness.test_any_number_of_processes_reaches_what_one_device_reaches
BUILT = "    model = build_model(args, train_set).to(device)\n"


def with_line(folder, script, line):
    """A copy of the script with a line after that which builds the model."""
    return edited(folder, script, (BUILT, f"{BUILT}    {line}\n"))


@pytest.mark.parametrize("line", ["model[2] = torch.nn.BatchNorm2d(32)", "model.insert(3, torch.nn.Dropout2d(0.1))"])
def test_a_layer_that_depends_on_the_share_fails_with_the_reason_that_the_readme_shows(line, tmp_path, monkeypatch):
    """Already in the first epoch."""
    monkeypatch.setattr(test_exactness, "EPOCHS", 1)
    readme = (ROOT / "README.md").read_text()
    assert "tests/test_exactness.py -k what_one_device_reaches`" in readme
    assert "what_one_device_reaches" in exactness.__name__
    (tmp_path / "single").mkdir()
    single = test_exactness.run(tmp_path / "single", with_line(tmp_path, "single_gpu.py", line))
    with pytest.raises(AssertionError) as failed:
        exactness(with_line(tmp_path, "ddp_torchrun.py", line), 2, single, tmp_path)
    said = str(failed.value).splitlines()[0].replace(f"{tmp_path}/", "")
    assert f"> {said}" in readme.splitlines()


def test_a_parameter_that_no_forward_pass_uses_fails_with_the_error_of_ddp(tmp_path):
    script = with_line(tmp_path, "ddp_torchrun.py", "model.unused = torch.nn.Parameter(torch.zeros(1))")
    with pytest.raises(AssertionError, match="Expected to have finished reduction in the prior iteration"):
        exactness(script, 2, None, tmp_path)


def test_images_of_single_precision_are_compared_in_double_precision(tmp_path):
    images = "train_set, test_set = sets = load_data(args)\n    for part in sets:\n        part.images = part.images.float()"
    runs = []
    for script, nproc in ("single_gpu.py", 1), ("ddp_torchrun.py", 2):
        path = edited(tmp_path, script, ("train_set, test_set = load_data(args)", images))
        runs.append(run_script(tmp_path, path, "--epochs", 1, "--batch-size", 240, nproc=nproc, float64=True))
        assert runs[-1].status == 0, runs[-1].stderr
    assert losses(runs[1]) == pytest.approx(losses(runs[0]), rel=1e-9)
