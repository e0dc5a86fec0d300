"""The recipes of the README: patch applies each to a script, which then does what is said of it."""

import ast
import itertools
import re
import shutil
import subprocess
import tempfile

import pytest
import torch
from torch.utils.data import DataLoader

from common.data import load_data
from common.model import build_model
from tests.conftest import GPUS, WITH_GPUS, newest
from tests.models import model_and_batch
from tests.processes import ROOT, TORCHRUN, edited, epochs_printed, run_command, run_ranks, run_script, run_scripts

SECTION = (ROOT / "README.md").read_text().split("## Recipes\n")[1].split("\n## ")[0]
RECIPES = dict(re.findall(r"<summary>(.+?)</summary>.+?^```diff\n(.*?)^```$", SECTION, re.MULTILINE | re.DOTALL))
SHORT = ["--epochs", 1, "--batch-size", 484]  # 2 steps of 484 images, or of 242 for each of two ranks
ONE_STEP = ["--batch-size", 720, "--epochs", 1]
BUILT = "    model = build_model(args.model, train_set).to(device)\n"
CALL = "F.cross_entropy(ddp_model(images), labels)"
STEP = "            optimizer.step()\n"
LOOP = "    for epoch in range(first_epoch, args.epochs):\n"
BATCH_NORM = f"""\
{BUILT}    for number in 2, 5, 9:
        model[number] = torch.nn.BatchNorm2d(model[number].num_channels).to(device)
"""
pytestmark = pytest.mark.skipif(not shutil.which("patch"), reason="patch is not installed")


def patched(path, title):
    """Whether patch applies a recipe to a file, and leaves a program there."""
    command = ["patch", "--silent", "--force", "--no-backup-if-mismatch", "--reject-file=-", str(path)]
    applied = subprocess.run(command, input=RECIPES[title], text=True, stdout=subprocess.DEVNULL).returncode == 0
    try:
        return applied and bool(ast.parse(path.read_text()))
    except SyntaxError:
        return False


def cooked(folder, title, *edits, script="ddp_torchrun.py"):
    """A copy of a script with a recipe applied, unless the title is None, and each (old, new) replaced."""
    path = edited(tempfile.mkdtemp(dir=folder), script)
    assert title is None or patched(path, title)
    return edited(path.parent, path, *edits)


def run(folder, title, *edits, nproc=2, options=SHORT, float64=True, script="ddp_torchrun.py"):
    """Run such a copy."""
    result = run_script(folder, cooked(folder, title, *edits, script=script), *options, nproc=nproc, float64=float64)
    assert result.status == 0, result.stderr
    return result


def printing(expression):
    """A statement for a copy: print what an f-string says, as one write, which those of other ranks cannot split."""
    return f'os.write(1, f"{expression}\\n".encode())\n'


def printed(result, pattern):
    return re.findall(f"^{pattern}$", result.stdout, re.MULTILINE)


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """What one device reaches."""
    return run_script(tmp_path_factory.mktemp("single"), "single_gpu.py", *SHORT, float64=True)


def test_a_recipe_is_short_and_patch_applies_it_to_both_scripts(tmp_path):
    assert len(RECIPES) == SECTION.count("<details>") == 13
    for title, diff in RECIPES.items():
        texts = [cooked(tmp_path, title, script=name).read_text() for name in ("ddp_torchrun.py", "ddp_mp_spawn.py")]
        tails = [text.split("torch.manual_seed(args.seed)\n", 1)[1] for text in texts]
        assert tails[0] == tails[1] and max(map(len, texts[0].splitlines())) <= 120
        assert ("import contextlib\n" in texts[0]) == ("import contextlib\n" in texts[1])
        assert 1 <= sum(line[0] in "+-" for line in diff.splitlines()) <= 11


def test_two_recipes_combine_unless_they_change_the_same_line_as_the_readme_says(tmp_path):
    apart, pairs = set(), list(itertools.permutations(RECIPES, 2))
    for first, second in pairs:
        paths = [cooked(tmp_path, first, script=script) for script in ("ddp_torchrun.py", "ddp_mp_spawn.py")]
        if not all(patched(path, second) for path in paths):
            apart.add((first, second))
    named = [title for title, diff in RECIPES.items() if "+    first_epoch = load_checkpoint(" in diff]
    expected = {*itertools.permutations(named, 2), *itertools.permutations(list(RECIPES)[:2], 2)}
    assert apart == expected and (len(named), len(pairs)) == (3, 156)


# Gradient accumulation

PIECES = "zip(images.chunk(2), labels.chunk(2))"
NO_SYNC = "                with contextlib.nullcontext() if number == len(pieces) else ddp_model.no_sync():\n"
HOOK = f"""\
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
    def noted_all_reduce(_, bucket):
        {printing("rank {rank} reduces").strip()}
        return allreduce_hook(None, bucket)
    ddp_model.register_comm_hook(None, noted_all_reduce)
    def noted_forward(_, inputs):
        {printing("rank {rank} sees {len(inputs[0])}").strip()}
    ddp_model.register_forward_pre_hook(noted_forward)
"""
NOTED = (LOOP, HOOK + LOOP)


@pytest.mark.parametrize("nproc", [1, 2])
def test_any_number_of_pieces_gives_the_result_of_one_with_one_all_reduce_a_step(nproc, single, tmp_path):
    for sizes in ([484 // 2] * 2, [162, 162, 160]) if nproc == 1 else ([242 // 2] * 2, [81, 81, 80]):
        count = (PIECES, PIECES.replace("2", str(len(sizes))))
        result = run(tmp_path, "Gradient accumulation", count, NOTED, nproc=nproc)
        assert result.losses == pytest.approx(single.losses, rel=1e-9)
        equal = (', reduction="sum") / len(labels)', ") / len(pieces)")
        unweighted = run(tmp_path, "Gradient accumulation", count, equal, nproc=nproc)
        assert (unweighted.losses == pytest.approx(single.losses, rel=1e-9)) == (len(sizes) == 2)
        for rank in range(nproc):
            assert printed(result, f"rank {rank} sees (.+)") == [str(size) for size in sizes] * 2
            assert len(printed(result, f"rank {rank} reduces")) == 2


def test_without_no_sync_or_with_the_forward_pass_outside_of_it_every_piece_is_all_reduced(tmp_path):
    everywhere = [("ddp_model.no_sync()", "contextlib.nullcontext()")]
    forward_outside = [
        (f"{NO_SYNC}                    part = ", "                part = "),
        ("                    part.backward()", f"{NO_SYNC}                    part.backward()"),
    ]
    for edits in everywhere, forward_outside:
        result = run(tmp_path, "Gradient accumulation", NOTED, *edits, options=ONE_STEP, float64=False)
        assert len(printed(result, "rank 0 reduces")) == 2


# bfloat16


def test_with_bfloat16_the_network_learns_as_well_and_its_weights_stay_float32(tmp_path):
    dtype = (CALL, f"F.cross_entropy(logits := ddp_model(images), labels); {printing('{logits.dtype}').strip()}")
    options = ["--epochs", 3, "--checkpoint", tmp_path / "model.pt"]
    result = run(tmp_path, "bfloat16", dtype, options=options, float64=False)
    assert set(printed(result, "torch.*")) == {"torch.bfloat16"} and result.accuracies[-1] >= 0.95
    saved = torch.load(tmp_path / "model.pt", weights_only=True)
    assert {weight.dtype for weight in saved["model"].values()} == {torch.float32}
    half, brain, full = (torch.finfo(dtype) for dtype in (torch.float16, torch.bfloat16, torch.float32))
    assert brain.smallest_normal == full.smallest_normal < half.smallest_normal


# Gradient clipping

CLIP = "            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"


def test_all_ranks_find_the_norm_of_the_whole_gradient_and_clip_as_one_device_would(single, tmp_path):
    noted = (CLIP, f"            norm = {CLIP.strip()}\n            {printing('rank {rank} norm {norm.item()!r}')}")
    alone = (STEP, noted[1].replace("{rank}", "0") + STEP)
    result = run(tmp_path, "Gradient clipping", noted)
    imports = ("import time\n", "import os\nimport time\n")
    expected = run(tmp_path, None, alone, imports, script="single_gpu.py", nproc=1)
    assert result.losses == pytest.approx(expected.losses, rel=1e-9)
    assert result.losses != pytest.approx(single.losses, rel=1e-3)
    first, second = (printed(result, f"rank {rank} norm (.+)") for rank in (0, 1))
    whole = [float(norm) for norm in printed(expected, "rank 0 norm (.+)")]
    assert first == second and [float(norm) for norm in first] == pytest.approx(whole, rel=1e-9) and max(whole) > 1


# More state in the checkpoint, and what is random in an epoch: a run that was stopped and resumed


CALLS = "    # Without this no", "\n    # Without this NCCL"  # what follows load_checkpoint and save_checkpoint


def stopped_and_resumed(folder, title, *edits, epochs=2):
    """A run that never stopped, one that was resumed before its last epoch, and what that has saved."""
    path = cooked(folder, title, *edits)
    short, saving = ONE_STEP[:-1], ["--checkpoint", path.with_name("model.pt")]
    stops = [(folder, path, *short, epochs), (folder, path, *short, epochs - 1, *saving)]
    runs = [*run_scripts(stops, nproc=2), run_script(folder, path, *short, epochs, *saving, nproc=2)]
    assert [each.status for each in runs] == [0, 0, 0], [each.stderr for each in runs]
    assert f"after epoch {epochs - 1}" in runs[2].stdout
    return runs[0], runs[2], torch.load(saving[1], weights_only=True)


def last_weights(result):
    return [rank[-1] for rank in result.weights]


@pytest.mark.parametrize(
    ("title", "name", "edits"),
    [
        ("A learning-rate schedule", "scheduler", [("(optimizer, args.epochs)", "(optimizer, 2)")]),
        ("An average of the weights", "average", [("count_correct(model, test", "count_correct(average, test")]),
    ],
)
def test_a_schedule_and_an_average_are_resumed_and_what_is_not_named_starts_anew_or_is_refused(
    title, name, edits, tmp_path
):
    whole, resumed, saved = stopped_and_resumed(tmp_path, title, *edits)
    assert last_weights(whole) == last_weights(resumed)
    assert {"scheduler": "last_epoch", "average": "n_averaged"}[name] in saved[name]
    unnamed = [(f", {name}={name})\n{line}", f")\n{line}") for line in CALLS]
    if name == "average":
        whole, resumed, _ = stopped_and_resumed(tmp_path, title, *edits, *unnamed)
        assert last_weights(whole) != last_weights(resumed)
    else:
        path = cooked(tmp_path, title, *unnamed)
        result = run_script(tmp_path, path, *ONE_STEP, "--checkpoint", tmp_path / "model.pt", nproc=2)
        assert result.status and "need the scheduler of the learning rate by name" in result.stderr


def test_the_best_weights_survive_a_resume_and_a_worse_epoch_and_all_ranks_would_choose_the_same(tmp_path):
    worse = (STEP, f"{STEP}            if epoch == 2: model[-1].weight.data.zero_()\n")
    if_0, note = "        if rank == 0:\n", printing("rank {rank} totals {totals.tolist()}")
    noted = (if_0, f"        {note}{if_0}")
    best = ('"best.pt"', f'"{tmp_path}/best.pt"')
    whole, resumed, saved = stopped_and_resumed(tmp_path, "Keep the best", worse, noted, best, epochs=3)
    train_set, test_set = load_data("digits", None)
    model = build_model("cnn", train_set)
    model.load_state_dict(torch.load(tmp_path / "best.pt", weights_only=True))
    correct = (model(test_set[:][0]).argmax(1) == test_set[:][1]).sum()
    found = [round(360 * accuracy) for accuracy in whole.accuracies]
    assert correct == saved["best"]["correct"] == max(found[:2]) > found[2] == round(360 * resumed.accuracies[-1])
    first, second = (printed(whole, f"rank {rank} totals (.+)") for rank in (0, 1))
    assert first == second and len(first) == 3


def test_dropout_draws_other_numbers_on_each_rank_and_in_each_epoch_and_the_same_after_a_resume(tmp_path):
    dropout = (BUILT, f"{BUILT}    model[-2] = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Dropout())\n")
    draw = (STEP, STEP + "            " + printing("rank {rank} draws {torch.rand(1).item()!r}"))
    for title, different in ("Dropout and random augmentation", 4), (None, 2):
        whole, resumed, _ = stopped_and_resumed(tmp_path, title, dropout, draw)
        assert (last_weights(whole) == last_weights(resumed)) == bool(title)
        first, second = (printed(whole, f"rank {rank} draws (.+)") for rank in (0, 1))
        assert len(first) == len(second) == 2 and len({*first, *second}) == different


# Stop early


def test_ranks_stop_together_when_one_is_late_and_if_one_stops_alone_the_run_fails(tmp_path):
    late = ("float(time.monotonic() > end)", "float(rank == 0 and epoch == 1)")
    options = [*ONE_STEP[:-1], 3]
    result = run(tmp_path, "Stop early", late, options=options)
    assert [len(rank) for rank in result.weights] == [1, 1]
    result = run(tmp_path, "Stop early", ("+ 3600", "- 1"), options=options)
    assert result.weights == [[], []]
    alone = cooked(tmp_path, "Stop early", late, ("        dist.all_reduce(late)\n", ""))
    assert run_script(tmp_path, alone, *options, nproc=2).status != 0


# Weighted or custom sampling


def test_weighted_shards_make_one_draw_in_which_the_classes_are_equal(tmp_path):
    title = "Weighted or custom sampling"
    two, one = (run(tmp_path, title, nproc=nproc, options=["--epochs", 2]) for nproc in (2, 1))
    first, second = two.batch
    for step, whole in enumerate(one.batch[0]):
        assert (whole[0::2], whole[1::2]) == (first[step], second[step])
    assert len(one.batch[0]) == 2 * 29 and one.batch[0][:29] != one.batch[0][29:]
    assert two.losses == pytest.approx(one.losses, rel=1e-9)
    labels = torch.cat([torch.arange(10).repeat_interleave(n) for n in range(10, 101, 10)])
    weight = eval(RECIPES[title].split("weights, count = ")[1].split(",")[0], {"targets": labels})
    torch.testing.assert_close(torch.zeros(10).index_add(0, labels, weight), torch.ones(10))


def test_a_weighted_sampler_alone_deals_all_ranks_the_same_images_in_twice_the_steps(tmp_path):
    sampler = "torch.utils.data.WeightedRandomSampler([1.0] * len(train_set), len(train_set))"
    edits = ("DistributedSampler(train_set, seed=args.seed, drop_last=True)", sampler), ("sampler.set_epoch", "int")
    first, second = run(tmp_path, None, *edits, options=["--epochs", 1], float64=False).batch
    assert first == second and len(first) == 1437 // 24 > 2 * (1437 // 48)


# torch.compile


@newest
def test_compiled_in_place_result_and_keys_stay_and_the_wrapper_compiles_no_convolution(single, tmp_path):
    backend = f"""\
    def backend(graph, _):
        convolutions = sum("conv2d" in str(node.target) for node in graph.graph.nodes)
        {printing("rank {rank} compiles {convolutions} convolutions").strip()}
        return graph
"""
    compiled = ("    model.compile()\n", f"{backend}    model.compile(backend=backend)\n")
    result = run(tmp_path, "torch.compile", compiled, options=[*SHORT, "--checkpoint", tmp_path / "model.pt"])
    assert set(printed(result, "rank . compiles (.) convolutions")) == {"3"}
    assert result.losses == pytest.approx(single.losses, rel=1e-9)
    keys = list(torch.load(tmp_path / "model.pt", weights_only=True)["model"])
    model, _, _ = model_and_batch(0, 0)
    assert keys == list(model.state_dict())
    assert list(torch.compile(model).state_dict()) == [f"_orig_mod.{key}" for key in keys]
    wrapper = (LOOP, f"    ddp_model.compile(backend=backend)\n{LOOP}"), ("    model.compile()\n", backend)
    result = run(tmp_path, "torch.compile", *wrapper, options=ONE_STEP)
    assert set(printed(result, "rank . compiles (.) convolutions")) == {"0"}


# Images on disk


def test_neither_the_number_of_workers_nor_that_of_processes_changes_the_result_of_images_on_disk(tmp_path):
    from PIL import Image  # torchvision brings it

    torch.manual_seed(0)
    for part, name, number in itertools.product(("train", "test"), range(10), range(3)):
        (folder := tmp_path / "photos" / part / f"class{name}").mkdir(parents=True, exist_ok=True)
        Image.frombytes("L", (8, 8), bytes(torch.randint(256, (64,)).tolist())).save(folder / f"{number}.png")
    options = ["--epochs", 2, "--batch-size", 8, "--data-root", tmp_path / "photos"]
    fork = ("num_workers=2", 'num_workers=2, multiprocessing_context="fork"')  # in a test the default starts anew
    alone = ("num_workers=2, persistent_workers=True", "num_workers=0")
    result = run(tmp_path, "Images on disk", fork, options=options)
    expected = run(tmp_path, "Images on disk", alone, options=options, nproc=1)
    assert "30 training and 30 test images" in result.stdout and result.accuracies == expected.accuracies
    assert result.losses == pytest.approx(expected.losses, rel=1e-9) and len(result.losses) == 2


def read_noise(rank, first_epoch, persistent):
    """What two workers draw in the second epoch, as augmentation does, in a run that starts with first_epoch."""
    workers = {"num_workers": 2, "persistent_workers": persistent, "multiprocessing_context": "fork"}
    loader = DataLoader(range(8), 4, collate_fn=lambda batch: torch.rand(len(batch)), **workers)
    for epoch in range(first_epoch, 2):
        torch.manual_seed(epoch)
        drawn = torch.cat(list(loader))
    return drawn


def test_persistent_workers_that_augment_draw_other_numbers_in_a_resumed_run(tmp_path):
    for persistent, equal in (False, True), (True, False):
        [whole], [resumed] = (run_ranks(tmp_path, read_noise, epoch, persistent, nproc=1) for epoch in (0, 1))
        assert torch.equal(whole, resumed) == equal


# BatchNorm


def test_with_batch_norm_the_loss_depends_on_n_and_each_process_evaluates_a_model_of_its_own(tmp_path):
    """With the default batch the loss of the first epoch is 0.7 % higher on two."""
    norm, options = (BUILT, BATCH_NORM), ["--epochs", 1]
    alone, parted = (run(tmp_path, None, norm, nproc=nproc, options=options) for nproc in (1, 2))
    assert parted.losses[0] == pytest.approx(1.007 * alone.losses[0], rel=5e-4)
    first, second = parted.weights
    assert len(first) == 1 and first != second


def test_sync_batch_norm_keeps_the_keys_and_is_refused_on_the_cpu(tmp_path):
    path = cooked(tmp_path, "BatchNorm", (BUILT, BATCH_NORM))
    result = run_script(tmp_path, path, *SHORT, nproc=2)
    assert result.status == 1 and "SyncBatchNorm layers only work with GPU modules" in result.stderr
    layer = torch.nn.Sequential(torch.nn.BatchNorm2d(1))
    converted = torch.nn.SyncBatchNorm.convert_sync_batchnorm(layer)
    assert isinstance(converted[0], torch.nn.SyncBatchNorm) and list(converted.state_dict()) == list(layer.state_dict())


@pytest.mark.skipif(GPUS < 2, reason="fewer than two GPUs")
def test_with_sync_batch_norm_two_gpus_reach_what_one_reaches(tmp_path):
    command, path = TORCHRUN[:-1], cooked(tmp_path, "BatchNorm", (BUILT, BATCH_NORM))
    one, two = (
        run_command(*command, f"--nproc_per_node={nproc}", path, "--epochs", 1, environment=WITH_GPUS)
        for nproc in (1, 2)
    )
    [[loss, _]], [[expected, _]] = epochs_printed(two.stdout), epochs_printed(one.stdout)
    assert loss == pytest.approx(expected, rel=1e-3)  # float32; without the recipe 7e-3


# A batch for each process


def test_a_batch_for_each_process_gives_the_result_of_one_device_with_the_sum_of_them(single, tmp_path):
    options = ["--epochs", 1, "--batch-size", 242, "--lr", 0.01, "--checkpoint", tmp_path / "model.pt"]
    result = run(tmp_path, "A batch for each process", options=options)
    assert result.losses == pytest.approx(single.losses, rel=1e-9) and "global batch 484" in result.stdout
    assert {len(batch) for rank in result.batch for batch in rank} == {242}
    settings = torch.load(tmp_path / "model.pt", weights_only=True)["settings"]
    assert (settings["batch_size"], settings["lr"]) == (484, 0.02)
