"""The number of processes does not change the result."""

import re

import pytest
import torch

from common.data import load_data
from common.model import build_model
from tests.processes import ROOT, SCRIPTS, edited, run_script

RUNS = [(script, nproc) for script in SCRIPTS[1:] for nproc in (1, 2, 3, 4)]
EPOCHS = 3
FAST = ["--batch-size", 240]  # where the default is not the point


def run(folder, script, nproc=1, epochs=None, float64=True, options=()):
    """Run a script and load what it saved."""
    options = "--epochs", epochs or EPOCHS, "--checkpoint", folder / "model.pt", *options
    result = run_script(folder, script, *options, nproc=nproc, float64=float64)
    assert result.status == 0, result.stderr
    result.folder = folder
    result.saved = torch.load(folder / "model.pt", weights_only=True)
    return result


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    return run(tmp_path_factory.mktemp("single"), "single_gpu.py")


WHY = (
    "{} on {} processes does not train what single_gpu.py trains. Causes, if you changed common/model.py or "
    "common/data.py: a layer that looks across the batch (BatchNorm: take GroupNorm), one that draws random numbers "
    "(dropout: other processes draw others), or data that each rank reads in its own way (seed it with args.seed)"
)


def assert_equal(result, single, why):
    assert result.losses == pytest.approx(single.losses, rel=1e-9), why
    assert result.accuracies == single.accuracies, why
    assert result.saved["model"].keys() == single.saved["model"].keys()
    for name, weight in single.saved["model"].items():
        assert weight.dtype == torch.float64 or not weight.is_floating_point()
        torch.testing.assert_close(result.saved["model"][name], weight, rtol=0, atol=1e-8, msg=f"{why}: {name}")


@pytest.mark.parametrize(("script", "nproc"), RUNS)
def test_any_number_of_processes_reaches_what_one_device_reaches(script, nproc, single, tmp_path):
    result = run(tmp_path, script, nproc)
    assert len(result.losses) == EPOCHS
    assert_equal(result, single, WHY.format(script, nproc))


@pytest.fixture(scope="module", params=[*zip(SCRIPTS, (1, 2, 2), strict=True)], ids=SCRIPTS)
def whole(request, tmp_path_factory):
    """A run, and how to run the same command, or one with other options, in another folder."""

    def again(folder, epochs=None, options=()):
        return run(folder, *request.param, epochs, float64=False, options=[*FAST, *options])

    return again(tmp_path_factory.mktemp("whole")), again


def test_the_same_command_twice_gives_the_same_bits_and_another_seed_others(whole, tmp_path):
    first, again = whole
    second = again(tmp_path / "same")
    assert (first.losses, first.weights) == (second.losses, second.weights) and len(first.weights[0]) == EPOCHS
    other = again(tmp_path / "other", 1, ["--seed", 1])
    assert other.losses != first.losses[:1] and len(other.losses) == 1


def test_a_run_that_stops_and_resumes_ends_with_the_bits_of_one_that_did_not(whole, tmp_path):
    whole, again = whole
    parts = [again(tmp_path, epochs) for epochs in (1, EPOCHS)]
    assert [loss for part in parts for loss in part.losses] == whole.losses
    assert str(parts[-1].saved) == str(whole.saved)
    for name, weight in whole.saved["model"].items():
        assert torch.equal(parts[-1].saved["model"][name], weight)


def test_the_saved_model_in_a_plain_process_has_the_accuracy_that_was_printed(whole):
    result, _ = whole
    train_set, test_set = load_data("digits", None)
    model = build_model("cnn", train_set)
    [line] = re.findall(r"`(model\.load_state_dict\(.+?)`", (ROOT / "README.md").read_text())
    exec(line.replace("model.pt", f"{result.folder}/model.pt"), {"model": model, "torch": torch})
    correct = (model(test_set[:][0]).argmax(1) == test_set[:][1]).sum().item()
    assert result.accuracies[-1] == correct / 360
    assert f"test accuracy {correct / 360:.2%}" in result.stdout.splitlines()[-2]


def test_one_checkpoint_serves_all_scripts_whatever_the_number_of_processes(tmp_path):
    whole = run(tmp_path / "whole", "single_gpu.py", epochs=4, options=FAST)
    stages = [("ddp_torchrun.py", 4), ("ddp_torchrun.py", 2), ("single_gpu.py", 1), ("ddp_mp_spawn.py", 3)]
    parts = [run(tmp_path / "parts", *stage, epochs, options=FAST) for epochs, stage in enumerate(stages, 1)]
    assert [len(part.losses) for part in parts] == [1, 1, 1, 1]
    assert [loss for part in parts for loss in part.losses] == pytest.approx(whole.losses, rel=1e-9)
    for finished, part in enumerate(parts[1:], 1):
        assert f"resuming from {tmp_path}/parts/model.pt after epoch {finished} of " in part.stdout


# A check of the reader's own model: where it does not suit, the comparison above says so, and why


def compare_edited(folder, line, lines):
    """Compare one epoch of two scripts with a line replaced, on one and on two processes."""
    runs = []
    for nproc, script in enumerate(("single_gpu.py", "ddp_torchrun.py"), 1):
        (folder / script[:-3]).mkdir()
        runs.append(run(folder / script[:-3], edited(folder, script, (line, lines)), nproc, 1, options=FAST))
    assert_equal(runs[1], runs[0], WHY.format("ddp_torchrun.py", 2))


@pytest.mark.parametrize("layer", ["model[2] = torch.nn.BatchNorm2d(32)", "model.insert(3, torch.nn.Dropout2d(0.1))"])
def test_a_layer_that_depends_on_the_shard_fails_and_the_causes_are_named(layer, tmp_path):
    name = test_any_number_of_processes_reaches_what_one_device_reaches.__name__
    assert "what_one_device_reaches`" in (ROOT / "README.md").read_text() and "what_one_device_reaches" in name
    built = "    model = build_model(args.model, train_set).to(device)\n"
    with pytest.raises(AssertionError, match="does not train what single_gpu.py trains") as failed:
        compare_edited(tmp_path, built, f"{built}    {layer}\n")
    assert all(cause in str(failed.value) for cause in ("BatchNorm: take GroupNorm", "dropout", "with args.seed"))


def test_images_of_single_precision_are_compared_in_double_precision(tmp_path):
    line = "    train_set, test_set = load_data(args.dataset, args.data_root)\n"
    tensors = "part.tensors = part.tensors[0].float(), part.tensors[1]"
    compare_edited(tmp_path, line, f"{line}    for part in train_set, test_set:\n        {tensors}\n")
