"""Each line that DDP adds: what it does, and what becomes of the run without it."""

import itertools
import os
import re
import signal
import socket
import sys
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader

from tests import processes
from tests.processes import ROOT, SCRIPTS, edited, run_script, wait_for

_, SPAWN, BY_TORCHRUN = SCRIPTS
both_scripts = pytest.mark.parametrize("script", SCRIPTS[1:])
SAMPLER = "DistributedSampler(train_set, seed=args.seed, drop_last=True)"
SET_EPOCH, END_TOGETHER = ("        sampler.set_epoch(epoch)\n", ""), ("@end_together\n", "")
LAUNCHER = {SPAWN: [('init_method="spawn://", ', ""), END_TOGETHER]}
LAUNCHER |= {BY_TORCHRUN: [(', init_method="torchrun://"', ""), ("@record\n", "")]}
BATCH = 240  # fewer steps than with the default
STEPS = 1437 // BATCH


def run(folder, *edits, script=BY_TORCHRUN, nproc=2, epochs=1, options=(), environment=None):
    """Run a script, or a copy in which each (old, new) is replaced."""
    path = edited(folder, script, *edits) if edits else script
    options = "--epochs", epochs, "--batch-size", BATCH, *options
    return run_script(folder, path, *options, nproc=nproc, environment=environment)


@pytest.fixture(scope="module")
def shipped(tmp_path_factory):
    """What two epochs of each DDP script do as they stand, which the tests compare with edited copies."""
    runs = {script: run(tmp_path_factory.mktemp("shipped"), script=script, epochs=2) for script in SCRIPTS[1:]}
    assert [(result.status, len(result.losses)) for result in runs.values()] == [(0, 2)] * 2
    return runs


@pytest.fixture
def address():
    """What any launcher or a person can set: an address with a port that is free, on which rank 0 hosts the store."""
    with socket.socket() as port:
        port.bind(("127.0.0.1", 0))
        number = str(port.getsockname()[1])
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": number, "TORCHELASTIC_USE_AGENT_STORE": ""}


def test_each_process_takes_its_share_of_the_cores(shipped):
    cores = len(os.sched_getaffinity(0))
    for result in shipped.values():
        assert sorted(sum(result.threads, [])) == [max(1, cores // 2)] * 2


def test_ten_runs_can_start_at_the_same_moment(tmp_path):
    runs = processes.run_scripts([(tmp_path, SPAWN, "--epochs", 1, "--batch-size", 720)] * 10, nproc=2)
    assert [result.status for result in runs] == [0] * 10
    assert len({tuple(result.losses) for result in runs}) == 1


def test_variables_left_over_from_another_launcher_do_not_disturb_a_run(tmp_path, shipped):
    stale = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "3", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1"}
    assert run(tmp_path, script=SPAWN, environment=stale).losses == shipped[SPAWN].losses[:1]


@pytest.mark.parametrize("edits", [[], [END_TOGETHER]])
def test_without_end_together_the_children_of_an_interrupted_parent_train_on(edits, tmp_path, address):
    (tmp_path / "common").symlink_to(ROOT / "common")
    options = "--epochs", 1000, "--batch-size", 720, "--checkpoint", tmp_path / "model.pt"
    with processes.started(sys.executable, edited(tmp_path, SPAWN, *edits), *options, environment=address) as process:
        assert wait_for((tmp_path / "model.pt").exists)
        os.kill(process.pid, signal.SIGINT)
        if not edits:
            assert wait_for(lambda: not process.family(), 20)
        for _ in range(3 * len(edits)):  # the first may have been under way
            before = (tmp_path / "model.pt").stat().st_mtime_ns
            assert wait_for(lambda before=before: (tmp_path / "model.pt").stat().st_mtime_ns != before, 20)


@both_scripts
def test_without_a_group_no_process_reaches_another(script, tmp_path):
    result = run(tmp_path, ("    dist.init_process_group(", "    dict(backend="), script=script)
    assert result.status == 1 and "process group has not been initialized" in result.stderr


@both_scripts
def test_the_address_of_the_launchers_module_does_not_change_what_is_trained(script, tmp_path, shipped, address):
    """Nor does the decorator: without both it is the script of PyTorch's documentation."""
    one, both = LAUNCHER[script][:1], LAUNCHER[script]
    for edits, environment in (one, {}), (both, address):
        result = run(tmp_path, *edits, script=script, epochs=2, environment=environment)
        assert result.weights == shipped[script].weights


def test_the_standard_variables_alone_which_any_launcher_can_set_are_enough(tmp_path, shipped, address):
    assert run(tmp_path, epochs=2, environment=address).weights == shipped[BY_TORCHRUN].weights


def test_every_step_takes_the_batch_of_one_device_whatever_the_number_of_images_and_of_processes(monkeypatch):
    """The shipped lines, for every n from 1 to 30, N from 1 to 8 and 1 to 3 images a process and step, in epoch 5."""
    lines = {}
    for script in "single_gpu.py", BY_TORCHRUN:
        lines[script] = re.findall(r"^ +((?:sampler|train_loader)\b.+)", (ROOT / script).read_text(), re.MULTILINE)
        assert len(lines[script]) == 3

    def dealt(script, n, batch_size, world_size, rank):
        names = dict(vars(torch.utils.data), torch=torch, train_set=range(n), epoch=5, world_size=world_size)
        names["args"] = SimpleNamespace(batch_size=batch_size, seed=3)
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda: world_size)
        monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)
        exec("\n".join(lines[script]), names)
        return [batch.tolist() for batch in names["train_loader"]]

    for n, world_size, shard in itertools.product(range(1, 31), range(1, 9), range(1, 4)):
        single = dealt("single_gpu.py", n, world_size * shard, 1, 0)
        shards = [dealt(BY_TORCHRUN, n, world_size * shard, world_size, rank) for rank in range(world_size)]
        assert [sorted(batch) for batch in single] == [sorted(sum(parts, [])) for parts in zip(*shards, strict=True)]
        assert len(single) == n // (world_size * shard)


def test_without_the_distributed_sampler_every_process_trains_on_the_same_images(tmp_path):
    from_all = "torch.utils.data.RandomSampler(train_set, generator=torch.Generator().manual_seed(0))"
    shards = run(tmp_path, (SAMPLER, from_all), SET_EPOCH).batch
    assert shards[0] == shards[1] and len(shards[0]) == 1437 * 2 // BATCH


def test_without_the_division_a_step_takes_the_batch_of_one_device_from_every_process(tmp_path, shipped):
    without = run(tmp_path, ("args.batch_size // world_size", "args.batch_size"))
    for result, shard in (shipped[BY_TORCHRUN], BATCH // 2), (without, BATCH):
        assert {len(batch) for rank in result.batch for batch in rank} == {shard}


def test_without_drop_last_the_sampler_repeats_images_to_fill_up_the_shards(tmp_path):
    """4 processes share 1,437 images as 4 x 360 = 1,440, which makes a third batch of 480 that nobody should see."""
    for edits, steps, repeated in ([], 2, 0), ([(SAMPLER, "DistributedSampler(train_set, seed=args.seed)")], 3, 3):
        shards = run(tmp_path, *edits, nproc=4, options=["--batch-size", 480]).batch
        dealt = [index for shard in shards for batch in shard for index in batch]
        assert (len(dealt), len(set(dealt))) == (480 * steps, 480 * steps - repeated)


def test_without_drop_last_the_loader_trains_on_a_smaller_last_batch(tmp_path, shipped):
    without = run(tmp_path, ("sampler=sampler, drop_last=True)", "sampler=sampler)"), epochs=2)
    for result, steps in (shipped[BY_TORCHRUN], STEPS), (without, STEPS + 1):
        assert {len(shard) for shard in result.batch} == {2 * steps}


def test_without_the_seed_the_sampler_deals_in_the_same_order_whatever_the_seed_of_the_run(tmp_path):
    for edits, same in ([], False), ([(SAMPLER, "DistributedSampler(train_set, drop_last=True)")], True):
        first, second = (run(tmp_path, *edits, options=["--seed", seed]).batch for seed in (0, 7))
        assert (first == second) == same


def test_evaluation_counts_each_test_image_once_whatever_their_number_and_that_of_processes():
    """The shipped line, for every n from 1 to 50 and N from 1 to 8; without the stride each process counts all."""
    [line] = re.findall("test_loader = .+", (ROOT / BY_TORCHRUN).read_text())
    without = line.replace(", sampler=range(rank, len(test_set), world_size)", "")
    names = {"DataLoader": DataLoader, "args": SimpleNamespace(batch_size=4)}
    for n, world_size in itertools.product(range(1, 51), range(1, 9)):
        for text, times in (line, 1), (without, world_size):
            counted = []
            for rank in range(world_size):
                exec(text, names := {**names, "test_set": range(n), "rank": rank, "world_size": world_size})
                counted += [image for batch in names["test_loader"] for image in batch.tolist()]
            assert sorted(counted) == sorted([*range(n)] * times)


@both_scripts
def test_without_the_wrapper_in_the_call_the_replicas_drift_apart(script, tmp_path, shipped):
    without = run(tmp_path, ("ddp_model(images)", "model(images)"), script=script, epochs=2)
    for result, equal in (shipped[script], True), (without, False):
        assert [a == b for a, b in zip(*result.weights, strict=True)] == [equal] * 2


def test_without_set_epoch_the_order_repeats(tmp_path, shipped):
    for result, repeats in (shipped[BY_TORCHRUN], False), (run(tmp_path, SET_EPOCH, epochs=2), True):
        assert [shard[:STEPS] == shard[STEPS:] for shard in result.batch] == [repeats] * 2


def test_without_all_reduce_rank_0_reports_its_own_shard(tmp_path, shipped):
    without = run(tmp_path, ("        dist.all_reduce(totals)\n", ""))
    for result, part in (shipped[BY_TORCHRUN], 1), (without, 2):
        assert result.totals[0][0][1::2] == [BATCH * STEPS // part, 360 // part]
    assert abs(without.losses[0] - shipped[BY_TORCHRUN].losses[0]) > 1e-4


def test_without_the_condition_every_process_prints_and_saves(tmp_path, shipped):
    without = run(tmp_path, ("if rank == 0:\n            report_epoch", "if True:\n            report_epoch"))
    for result, times in (shipped[BY_TORCHRUN], 1), (without, 2):
        assert result.stdout.count("epoch 1/") == result.stdout.count("not saved") == times


def test_without_destroy_process_group_the_group_outlives_the_training(tmp_path, shipped):
    without = run(tmp_path, ("    dist.destroy_process_group()\n", ""))
    for result, group in (shipped[BY_TORCHRUN], False), (without, True):
        assert result.group == [[group]] * 2
