"""The recipes of the README: each diff is applied to the script, run, and shown to do what is said of it."""

import ast
import itertools
import re
import shutil
import struct
import subprocess
import tempfile
import zlib
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from tests.conftest import GPUS, WITH_GPUS
from tests.processes import ROOT, accuracies, batches, losses, run_ranks, run_script, run_scripts, weights
from tests.test_commands import EPOCH, TORCHRUN
from tests.test_mechanism import flat, gradients, model_and_batch

README = ROOT / "README.md"
SECTION = README.read_text().split("## Recipes\n")[1].split("\n## ")[0]
RECIPES = re.findall(r"^\*\*(.+?)\.\*\* .*?^```diff\n(.*?)^```$", SECTION, re.MULTILINE | re.DOTALL)
TITLES = [title for title, _ in RECIPES]

BUILT = "    model = build_model(args, train_set).to(device)\n"
CALL = "F.cross_entropy(ddp_model(images), labels)"
STEP = "            optimizer.step()\n"
SHORT = ["--epochs", 1, "--batch-size", 484]  # 2 steps of 484 images, or of 242 for each of two ranks
ONE_STEP = ["--batch-size", 720, "--epochs", 1]
BATCH_NORM = f"""\
{BUILT}    for number in 2, 5, 9:
        model[number] = torch.nn.BatchNorm2d(model[number].num_channels).to(device)
"""


def applied(source, diff):
    """The source after a unified diff without a header; each line must stand exactly where the diff says."""
    old, new, place = source.splitlines(keepends=True), [], 0
    for line in diff.splitlines(keepends=True):
        if hunk := re.match(r"@@ -(\d+),\d+ \+(\d+),\d+ @@$", line):
            new += old[place : int(hunk[1]) - 1]
            place = int(hunk[1]) - 1
            assert len(new) == int(hunk[2]) - 1, line
        else:
            if line[0] in " -":
                assert old[place] == line[1:], f"line {place + 1} is {old[place]!r}, not {line[1:]!r}"
                place += 1
            if line[0] in " +":
                new.append(line[1:])
    return "".join(new + old[place:])


def cooked(folder, title, *edits, script="ddp_torchrun.py"):
    """A copy of a script with a recipe applied, unless the title is None, and each (old, new) replaced."""
    source = (ROOT / script).read_text()
    source = applied(source, dict(RECIPES)[title]) if title else source
    for old, new in edits:
        assert source.count(old) == 1, f"{old!r} occurs {source.count(old)} times"
        source = source.replace(old, new)
    path = Path(tempfile.mkdtemp(dir=folder)) / script
    path.write_text(source)
    return path


def run(folder, title, *edits, nproc=2, options=SHORT, float64=True, script="ddp_torchrun.py"):
    """Run such a copy."""
    path = cooked(folder, title, *edits, script=script)
    result = run_script(folder, path, *options, nproc=nproc, float64=float64)
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


needs_patch = pytest.mark.skipif(not shutil.which("patch"), reason="patch is not installed")


@needs_patch
@pytest.mark.parametrize("title", TITLES)
def test_a_recipe_is_short_and_patch_applies_it_to_both_scripts(title, tmp_path):
    diff = dict(RECIPES)[title]
    (tmp_path / "recipe.diff").write_text(diff)
    for script in "ddp_torchrun.py", "ddp_mp_spawn.py":
        shutil.copy(ROOT / script, tmp_path)
        subprocess.run(["patch", script, "recipe.diff"], cwd=tmp_path, check=True, capture_output=True)
    torchrun, spawn = ((tmp_path / script).read_text() for script in ("ddp_torchrun.py", "ddp_mp_spawn.py"))
    assert torchrun == applied((ROOT / "ddp_torchrun.py").read_text(), diff)
    assert torchrun.split("torch.manual_seed(args.seed)\n")[1] == spawn.split("torch.manual_seed(args.seed)\n")[1]
    assert ("import contextlib\n" in torchrun) == ("import contextlib\n" in spawn)
    assert 1 <= sum(line[0] in "+-" for line in diff.splitlines()) <= 10
    assert max(map(len, torchrun.splitlines())) <= 120


@needs_patch
def test_two_recipes_combine_but_for_what_the_readme_says(tmp_path):
    """By patch, which finds the lines where the first recipe has moved them; what it makes must be a program."""
    apart, pairs = set(), list(itertools.permutations(TITLES, 2))
    for first, second in pairs:
        path = cooked(tmp_path, first)
        command = ["patch", "--silent", "--force", "--reject-file=-", str(path)]
        patched = subprocess.run(command, input=dict(RECIPES)[second], text=True, stdout=subprocess.DEVNULL)
        try:
            assert patched.returncode == 0
            ast.parse(path.read_text())
        except (AssertionError, SyntaxError):
            apart.add((first, second))
    accumulation, bfloat16 = TITLES[:2]
    assert apart == {(accumulation, bfloat16), (bfloat16, accumulation)} and len(pairs) == 72


def test_there_are_nine_recipes():
    assert len(TITLES) == len(set(TITLES)) == 9


# Gradient accumulation

PIECES = "zip(images.chunk(2), labels.chunk(2))"
NO_SYNC = "                with contextlib.nullcontext() if number == len(pieces) else ddp_model.no_sync():\n"
HOOK = f"""\
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
    def noted_exchange(_, bucket):
        {printing("rank {rank} exchanges").strip()}
        return allreduce_hook(None, bucket)
    ddp_model.register_comm_hook(None, noted_exchange)
    def noted_forward(_, inputs):
        {printing("rank {rank} sees {len(inputs[0])}").strip()}
    ddp_model.register_forward_pre_hook(noted_forward)
"""
LOOP = "\n    for epoch in range(first_epoch, args.epochs):\n"
NOTED = (LOOP, HOOK + LOOP)


@pytest.mark.parametrize("nproc", [1, 2])
def test_accumulation_over_any_number_of_pieces_gives_the_result_of_one_with_one_exchange_a_step(
    nproc, single, tmp_path
):
    sizes = {2: [242, 242], 3: [162, 162, 160]} if nproc == 1 else {2: [121, 121], 3: [81, 81, 80]}
    for pieces in sizes:
        result = run(
            tmp_path, "Gradient accumulation", (PIECES, PIECES.replace("2", str(pieces))), NOTED, nproc=nproc
        )
        assert losses(result) == pytest.approx(losses(single), rel=1e-9)
        for rank in range(nproc):
            assert printed(result, f"rank {rank} sees (.+)") == [str(size) for size in sizes[pieces]] * 2
            assert len(printed(result, f"rank {rank} exchanges")) == 2


def test_without_no_sync_or_with_the_forward_pass_outside_of_it_every_piece_is_exchanged(tmp_path):
    everywhere = ("ddp_model.no_sync()", "contextlib.nullcontext()")
    forward_outside = [
        (f"{NO_SYNC}                    part = ", "                part = "),
        ("                    part.backward()", f"{NO_SYNC}                    part.backward()"),
    ]
    for edits in [everywhere], forward_outside:
        result = run(tmp_path, "Gradient accumulation", NOTED, *edits, options=ONE_STEP, float64=False)
        assert len(printed(result, "rank 0 exchanges")) == 2


def test_pieces_that_do_not_count_by_their_size_give_another_result(single, tmp_path):
    mean = (', reduction="sum") / len(labels)', ") / len(pieces)")
    result = run(tmp_path, "Gradient accumulation", mean, (PIECES, PIECES.replace("2", "3")))
    assert losses(result) != pytest.approx(losses(single), rel=1e-9)


# bfloat16


def test_with_bfloat16_the_network_learns_as_well_and_its_weights_stay_float32(tmp_path):
    dtype = (CALL, f"F.cross_entropy(logits := ddp_model(images), labels); {printing('{logits.dtype}').strip()}")
    options = ["--epochs", 3, "--checkpoint", tmp_path / "model.pt"]
    result = run(tmp_path, "bfloat16", dtype, options=options, float64=False)
    assert set(printed(result, "torch.*")) == {"torch.bfloat16"}
    assert accuracies(result)[-1] >= 0.95
    saved = torch.load(tmp_path / "model.pt", weights_only=True)
    assert {weight.dtype for weight in saved["model"].values()} == {torch.float32}


def test_a_small_gradient_is_0_in_float16_and_not_in_bfloat16_whose_exponents_are_those_of_float32():
    gradient = {}
    for dtype in torch.float16, torch.bfloat16:
        weight = torch.ones(1, 1, requires_grad=True)
        with torch.autocast("cpu", dtype):
            output = F.linear(torch.ones(1, 1), weight)
        (output.float() * 1e-9).sum().backward()
        gradient[dtype] = weight.grad.item()
    assert gradient[torch.float16] == 0 and gradient[torch.bfloat16] == pytest.approx(1e-9, rel=0.01)
    half, brain, single = (torch.finfo(dtype) for dtype in (torch.float16, torch.bfloat16, torch.float32))
    assert brain.smallest_normal == single.smallest_normal < half.smallest_normal
    assert brain.max == pytest.approx(single.max, rel=0.01)


# Gradient clipping

CLIP = "            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"


def test_all_ranks_find_the_norm_of_the_whole_gradient_and_clipping_gives_the_result_of_one_device(single, tmp_path):
    noted = (CLIP, f"            norm = {CLIP.strip()}\n            {printing('rank {rank} norm {norm.item()!r}')}")
    alone = (STEP, noted[1].replace("{rank}", "0") + STEP)
    result = run(tmp_path, "Gradient clipping", noted)
    imports = ("import time\n", "import os\nimport time\n")
    expected = run(tmp_path, None, alone, imports, script="single_gpu.py", nproc=1)
    assert losses(result) == pytest.approx(losses(expected), rel=1e-9)
    assert losses(result) != pytest.approx(losses(single), rel=1e-3)
    first, second = (printed(result, f"rank {rank} norm (.+)") for rank in (0, 1))
    assert len(first) == 2 and first == second
    whole = [float(norm) for norm in printed(expected, "rank 0 norm (.+)")]
    assert [float(norm) for norm in first] == pytest.approx(whole, rel=1e-9) and max(whole) > 1


# A learning-rate schedule, and what is random in an epoch: a run that was stopped and goes on


def stop_and_go_on(folder, title, *edits):
    """A run of two epochs, of a step each, that nobody stopped, and one that went on after the first."""
    path = cooked(folder, title, *edits)
    options, goes_on = ONE_STEP[:-1], ["--checkpoint", path.with_name("model.pt")]
    untouched, stopped = run_scripts([(folder, path, *options, 2), (folder, path, *options, 1, *goes_on)], nproc=2)
    resumed = run_script(folder, path, *options, 2, *goes_on, nproc=2)
    assert [untouched.status, stopped.status, resumed.status] == [0, 0, 0], untouched.stderr + resumed.stderr
    assert "after epoch 1" in resumed.stdout
    resumed.saved = torch.load(path.with_name("model.pt"), weights_only=True)
    return untouched, resumed


def last_weights(result):
    return [rank[-1] for rank in weights(result)]


def test_a_run_with_a_schedule_that_was_stopped_and_goes_on_reaches_the_bits_of_one_that_was_not(tmp_path):
    untouched, resumed = stop_and_go_on(tmp_path, "A learning-rate schedule")
    assert last_weights(untouched) == last_weights(resumed)
    assert resumed.saved["optimizer"]["param_groups"][0]["lr"] == pytest.approx(0.02 * 2 / 100)  # of the second step


def test_the_rate_rises_to_lr_in_100_steps_and_falls_with_the_square_root_of_the_step_on_every_rank(tmp_path):
    noted = (STEP, STEP + "            " + printing("rank {rank} lr {optimizer.param_groups[0]['lr']!r}"))
    options = ["--epochs", 1, "--batch-size", 12]
    result = run(tmp_path, "A learning-rate schedule", noted, options=options, float64=False)
    first, second = ([float(lr) for lr in printed(result, f"rank {rank} lr (.+)")] for rank in (0, 1))
    assert first == second and len(first) == 1437 // 12 == 119
    assert first[:100] == pytest.approx([0.0002 * step for step in range(1, 101)])
    assert [lr**2 * step for step, lr in enumerate(first[100:], 101)] == pytest.approx([0.02**2 * 100] * 19)


@pytest.fixture(scope="module")
def with_dropout(tmp_path_factory):
    """For a model with dropout, the runs of stop_and_go_on with the recipe, and without."""
    dropout = (BUILT, f"{BUILT}    model[-2] = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Dropout())\n")
    draw = (STEP, STEP + "            " + printing("rank {rank} draws {torch.rand(1).item()!r}"))
    folder = tmp_path_factory.mktemp("dropout")
    return [stop_and_go_on(folder, title, dropout, draw) for title in ("Dropout and random augmentation", None)]


def test_a_run_with_dropout_that_was_stopped_and_goes_on_reaches_the_bits_of_one_that_was_not(with_dropout):
    for (untouched, resumed), equal in zip(with_dropout, (True, False), strict=True):
        assert (last_weights(untouched) == last_weights(resumed)) == equal


def test_ranks_and_epochs_draw_different_numbers_and_without_the_recipe_all_ranks_the_same(with_dropout):
    for (untouched, _), different in zip(with_dropout, (4, 2), strict=True):
        first, second = (printed(untouched, f"rank {rank} draws (.+)") for rank in (0, 1))
        assert len(first) == len(second) == 2 and len({*first, *second}) == different


# torch.compile


def test_compilation_takes_the_whole_model_and_changes_neither_the_result_nor_the_checkpoint(single, tmp_path):
    backend = f"""\
    def backend(graph, _):
        convolutions = sum("conv2d" in str(node.target) for node in graph.graph.nodes)
        {printing("rank {rank} compiles {convolutions} convolutions").strip()}
        return graph
"""
    compiled = ("    model.compile()\n", f"{backend}    model.compile(backend=backend)\n")
    result = run(tmp_path, "torch.compile", compiled, options=[*SHORT, "--checkpoint", tmp_path / "model.pt"])
    assert set(printed(result, "rank . compiles (.) convolutions")) == {"3"}
    assert losses(result) == pytest.approx(losses(single), rel=1e-9)
    model, _, _ = model_and_batch(0, 0)
    assert list(torch.load(tmp_path / "model.pt", weights_only=True)["model"]) == list(model.state_dict())


def compiled_otherwise(rank):
    """The convolutions in each graph from the wrapper, and the keys of the model before and after torch.compile."""
    graphs = []

    def backend(graph, _):
        graphs.append(sum("conv2d" in str(node.target) for node in graph.graph.nodes))
        return graph

    model, images, _ = model_and_batch(0, rank)
    ddp_model = DistributedDataParallel(model)
    ddp_model.compile(backend=backend)
    ddp_model(images)
    return graphs, list(model.state_dict()), list(torch.compile(model).state_dict())


def test_the_wrapper_gives_the_compiler_no_convolution_and_torch_compile_renames_every_weight(tmp_path):
    [(graphs, before, after)] = run_ranks(tmp_path, compiled_otherwise, nproc=1)
    assert graphs == [0]
    assert after == [f"_orig_mod.{key}" for key in before]


# Images on disk


def write_images(folder, classes=10, images=3):
    """Write PNG files of 8x8 random grey pixels: train/CLASS/*.png and test/CLASS/*.png."""
    torch.manual_seed(0)
    for part in "train", "test":
        for name in range(classes):
            (folder / part / f"class{name}").mkdir(parents=True)
            for number in range(images):
                pixels = torch.randint(256, (8, 8), dtype=torch.uint8)
                (folder / part / f"class{name}" / f"{number}.png").write_bytes(png(pixels))


def png(pixels):
    """A PNG file of grey uint8 pixels (height, width): ISO/IEC 15948, colour type 0, filter 0 before each row."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    height, width = pixels.shape
    rows = b"".join(b"\0" + bytes(row.tolist()) for row in pixels)
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def test_neither_the_number_of_workers_nor_that_of_processes_changes_the_result_of_images_on_disk(tmp_path):
    write_images(tmp_path / "photos")
    options = ["--epochs", 2, "--batch-size", 8, "--data-root", tmp_path / "photos"]
    alone = ("num_workers=2, persistent_workers=True", "num_workers=0")
    fork = ("num_workers=2", 'num_workers=2, multiprocessing_context="fork"')  # in a test the default starts anew
    result = run(tmp_path, "Images on disk", fork, options=options)
    assert "30 training and 30 test images" in result.stdout
    expected = run(tmp_path, "Images on disk", alone, options=options, nproc=1)
    assert losses(result) == pytest.approx(losses(expected), rel=1e-9) and len(losses(result)) == 2
    assert accuracies(result) == accuracies(expected)


class Noise(Dataset):
    """Eight samples that are drawn at random when they are read, as augmentation does."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.rand(1)


def read_noise(rank, first_epoch, persistent):
    """What two workers draw in the second epoch, in a run that starts with first_epoch."""
    loader = DataLoader(Noise(), 4, num_workers=2, persistent_workers=persistent, multiprocessing_context="fork")
    for epoch in range(first_epoch, 2):
        torch.manual_seed(epoch)
        drawn = torch.cat(list(loader))
    return drawn


def test_persistent_workers_that_augment_draw_other_numbers_in_a_run_that_goes_on(tmp_path):
    for persistent, equal in (False, True), (True, False):
        [untouched], [resumed] = (run_ranks(tmp_path, read_noise, epoch, persistent, nproc=1) for epoch in (0, 1))
        assert torch.equal(untouched, resumed) == equal


# BatchNorm


def test_with_batch_norm_the_loss_depends_on_the_number_of_processes_and_each_evaluates_a_model_of_its_own(tmp_path):
    """With the default batch the loss of the first epoch is 0.7 % higher on two."""
    norm, options = (BUILT, BATCH_NORM), ["--epochs", 1]
    alone, parted = (run(tmp_path, None, norm, nproc=nproc, options=options) for nproc in (1, 2))
    assert losses(parted)[0] == pytest.approx(1.007 * losses(alone)[0], rel=5e-4)
    first, second = weights(parted)
    assert len(first) == 1 and first != second


def running_means(rank):
    """Parameters and running mean after a step from different images, and the mean after another forward pass."""
    _, images, _ = model_and_batch(0, rank)
    layer = torch.nn.BatchNorm2d(1)
    ddp_model = DistributedDataParallel(layer)
    ddp_model(images.float()).square().sum().backward()
    torch.optim.SGD(layer.parameters(), 0.1).step()
    first = layer.running_mean.clone()
    ddp_model(images.float())
    return flat(layer.parameters()), first, layer.running_mean, images.float().mean()


def test_batch_norm_keeps_weights_equal_and_running_means_apart_until_the_next_forward_pass_copies_those_of_rank_0(
    tmp_path,
):
    """By hand: a forward pass moves the mean by a tenth towards that of the rank's own images, from rank 0's."""
    (first, start, _, _), (second, other, after, own) = run_ranks(tmp_path, running_means)
    assert torch.equal(first, second) and not torch.equal(start, other)
    torch.testing.assert_close(after, 0.9 * start + 0.1 * own)


def test_sync_batch_norm_replaces_each_batch_norm_keeps_the_keys_and_is_refused_on_the_cpu(tmp_path):
    path = cooked(tmp_path, "BatchNorm", (BUILT, BATCH_NORM))
    result = run_script(tmp_path, path, *SHORT, nproc=2)
    assert result.status == 1 and "SyncBatchNorm layers only work with GPU modules" in result.stderr
    layer = torch.nn.Sequential(torch.nn.BatchNorm2d(1))
    converted = torch.nn.SyncBatchNorm.convert_sync_batchnorm(layer)
    assert isinstance(converted[0], torch.nn.SyncBatchNorm) and list(converted.state_dict()) == list(layer.state_dict())


@pytest.mark.skipif(GPUS < 2, reason="fewer than two GPUs")
def test_with_sync_batch_norm_two_gpus_reach_what_one_reaches(tmp_path):
    path = cooked(tmp_path, "BatchNorm", (BUILT, BATCH_NORM))
    found = []
    for nproc in 1, 2:
        command = [*TORCHRUN[:4], f"--nproc_per_node={nproc}", str(path), "--epochs", "1"]
        result = subprocess.run(command, env=WITH_GPUS, capture_output=True, text=True, timeout=300, check=True)
        [(loss, _)] = re.findall(EPOCH, result.stdout)
        found.append(float(loss))
    assert found[1] == pytest.approx(found[0], rel=1e-3)  # float32; without the recipe 7e-3


# A batch for each process


def test_a_batch_for_each_process_gives_the_result_of_one_device_with_the_sum_of_them(single, tmp_path):
    options = ["--epochs", 1, "--batch-size", 242, "--lr", 0.01, "--checkpoint", tmp_path / "model.pt"]
    result = run(tmp_path, "A batch for each process", options=options)
    assert losses(result) == pytest.approx(losses(single), rel=1e-9)
    assert {len(batch) for rank in batches(result) for batch in rank} == {242}
    assert "global batch 484" in result.stdout
    settings = torch.load(tmp_path / "model.pt", weights_only=True)["settings"]
    assert (settings["batch_size"], settings["lr"]) == (484, 0.02)


def moved(rank, lr, together):
    """How far the weights go from two batches: in one step with the mean of their gradients, or in a step for each."""
    torch.set_default_dtype(torch.float64)
    model, images, labels = model_and_batch(0, 0, size=48)
    optimizer, start = torch.optim.SGD(model.parameters(), lr), flat(model.parameters())
    for part in [slice(48)] if together else [slice(24), slice(24, 48)]:
        gradients(model, images[part], labels[part])
        optimizer.step()
    return flat(model.parameters()) - start


def test_a_step_with_n_times_the_rate_goes_about_as_far_as_n_steps(tmp_path):
    ways = (1e-4, False), (2e-4, True), (1e-4, True)
    [[two_steps], [scaled], [unscaled]] = (run_ranks(tmp_path, moved, *way, nproc=1) for way in ways)
    assert (scaled - two_steps).norm() < 0.02 * two_steps.norm()
    assert (unscaled - two_steps).norm() > 0.48 * two_steps.norm()
