"""Each line that DDP adds: what it does, and what becomes of the run without it. The comments quote the scripts."""

import itertools
import os
import signal
import socket
import sys
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

from tests.processes import ROOT, batches, edited, losses, run_script, run_scripts, started, totals, wait_for, weights

SAMPLER = "DistributedSampler(train_set, seed=args.seed, drop_last=True)"
SET_EPOCH = "        sampler.set_epoch(epoch)\n"
BATCH = 240  # fewer steps than with the default
STEPS = 1437 // BATCH


def run(folder, *edits, script="ddp_torchrun.py", nproc=2, epochs=1, options=()):
    """Run a script, or a copy in which each (old, new) is replaced."""
    path = edited(folder, script, *edits) if edits else script
    return run_script(folder, path, "--epochs", epochs, "--batch-size", BATCH, *options, nproc=nproc)


@pytest.fixture(scope="module")
def shipped(tmp_path_factory):
    """What two epochs of each DDP script do as they stand, which the tests compare with edited copies."""
    scripts = ["ddp_mp_spawn.py", "ddp_torchrun.py"]
    runs = {script: run(tmp_path_factory.mktemp("shipped"), script=script, epochs=2) for script in scripts}
    assert [(result.status, len(losses(result))) for result in runs.values()] == [(0, 2)] * 2
    return runs


# The launchers' modules


def test_each_process_takes_its_share_of_the_cores(shipped):
    cores = len(os.sched_getaffinity(0))
    for result in shipped.values():
        seen = [record["threads"] for rank in result.seen for record in rank if record["what"] == "threads"]
        assert seen == [max(1, cores // 2)] * 2


def test_twenty_runs_can_start_at_the_same_moment(tmp_path):
    runs = run_scripts([(tmp_path, "ddp_mp_spawn.py", "--epochs", 1, "--batch-size", 720)] * 20, nproc=2)
    assert [result.status for result in runs] == [0] * 20
    assert len({tuple(losses(result)) for result in runs}) == 1


def test_variables_left_over_from_another_launcher_do_not_disturb_a_run(tmp_path):
    stale = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "3", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1"}
    options = ["--epochs", 1, "--batch-size", 720]
    first, second = (
        run_script(tmp_path, "ddp_mp_spawn.py", *options, nproc=2, environment=variables) for variables in ({}, stale)
    )
    assert losses(first) == losses(second) != []


# Without this an interrupt of this process alone would leave its children training.


def test_without_end_together_the_children_of_an_interrupted_parent_train_on(tmp_path):
    (tmp_path / "common").symlink_to(ROOT / "common")
    address = 'os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free()))'
    alone = edited(
        tmp_path,
        "ddp_mp_spawn.py",
        ("@end_together\n", ""),
        ("import time\n", FREE_PORT),
        ("    mp.spawn(", f"    {address}\n    mp.spawn("),
    )
    for script, all_end in ("ddp_mp_spawn.py", True), (alone, False):
        checkpoint = tmp_path / f"{all_end}.pt"
        with started(
            sys.executable, script, "--epochs", 1000, "--batch-size", 720, "--checkpoint", checkpoint
        ) as process:
            assert wait_for(checkpoint.exists)
            os.kill(process.pid, signal.SIGINT)
            if all_end:
                assert wait_for(lambda: not process.family(), 20)
            else:
                before = checkpoint.stat().st_mtime_ns
                assert wait_for(lambda: checkpoint.stat().st_mtime_ns != before, 20), "they train on"


FREE_PORT = """import os, socket, time
def free():
    with socket.socket() as port:
        port.bind(("127.0.0.1", 0))
        return port.getsockname()[1]
"""


def test_what_a_child_refuses_ends_the_parent_with_the_same_line_and_status(tmp_path):
    guard = [
        ("@end_together\n", ""),
        ("import time\n", FREE_PORT),
        ("    mp.spawn(", '    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free()))\n    mp.spawn('),
    ]
    for edits, status, lines in ([], 2, 1), (guard, 1, 10):
        result = run(tmp_path, *edits, script="ddp_mp_spawn.py", options=["--batch-size", 1438])
        assert result.status == status and len(result.stderr.splitlines()) >= lines
        assert ("Traceback" in result.stderr) == bool(edits)


# Without a group no process could reach another.


@pytest.mark.parametrize("script", ["ddp_mp_spawn.py", "ddp_torchrun.py"])
def test_without_a_group_no_process_reaches_another(script, tmp_path):
    result = run(tmp_path, ("    dist.init_process_group(", "    dict(backend="), script=script)
    assert result.status == 1 and "process group has not been initialized" in result.stderr


@pytest.mark.parametrize(
    ("script", "init"),
    [("ddp_mp_spawn.py", 'init_method="spawn://", '), ("ddp_torchrun.py", ', init_method="torchrun://"')],
)
def test_the_address_of_the_launchers_module_does_not_change_what_is_trained(script, init, tmp_path, shipped):
    assert weights(run(tmp_path, (init, ""), script=script, epochs=2)) == weights(shipped[script])


def test_the_standard_variables_alone_which_any_launcher_can_set_are_enough(tmp_path, shipped):
    """Then rank 0 hosts the store itself."""
    with socket.socket() as port:
        port.bind(("127.0.0.1", 0))
        variables = {"TORCHELASTIC_USE_AGENT_STORE": "", "MASTER_PORT": str(port.getsockname()[1])}
    options = "--epochs", 2, "--batch-size", BATCH
    result = run_script(tmp_path, "ddp_torchrun.py", *options, nproc=2, environment=variables)
    assert weights(result) == weights(shipped["ddp_torchrun.py"])


# Without a shard of its own every process would train on all images.
# Without the division the global batch would grow with the number of processes.
# Without this stride every process would count all test images.


def test_the_shares_of_a_step_are_disjoint_and_make_the_batch_of_one_device(tmp_path, shipped):
    [single] = batches(run(tmp_path, script="single_gpu.py", nproc=1, epochs=2))
    assert len(single) == 2 * STEPS
    on_more = [*shipped.values(), *(run(tmp_path, nproc=nproc, epochs=2) for nproc in (3, 4))]
    for nproc, shares in zip([2, 2, 3, 4], map(batches, on_more), strict=True):
        assert [len(share) for share in shares] == [len(single)] * nproc
        for step, batch in enumerate(single):
            parts = [share[step] for share in shares]
            assert [len(part) for part in parts] == [BATCH // nproc] * nproc
            assert sorted(sum(parts, [])) == sorted(batch)  # no index twice, so the parts are disjoint
            assert len(set(batch)) == BATCH


def test_every_step_takes_the_batch_of_one_device_whatever_the_number_of_images_and_of_processes(monkeypatch):
    """The shipped lines, for every n from 1 to 30, N from 1 to 8 and 1 to 3 images a process and step, in epoch 5."""
    lines = {}
    for script in "single_gpu.py", "ddp_torchrun.py":
        text = [line.strip() for line in (ROOT / script).read_text().splitlines()]
        for start in "sampler = ", "train_loader = ", "sampler.":
            [line] = [line for line in text if line.startswith(start)]
            lines.setdefault(script, []).append(line)

    def dealt(script, n, batch_size, world_size, rank):
        names = dict(vars(torch.utils.data), torch=torch, train_set=range(n), epoch=5, world_size=world_size)
        names["args"] = SimpleNamespace(batch_size=batch_size, seed=3)
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda: world_size)
        monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)
        exec("\n".join(lines[script]), names)
        return [batch.tolist() for batch in names["train_loader"]]

    for n, world_size, share in itertools.product(range(1, 31), range(1, 9), range(1, 4)):
        single = dealt("single_gpu.py", n, world_size * share, 1, 0)
        shares = [dealt("ddp_torchrun.py", n, world_size * share, world_size, rank) for rank in range(world_size)]
        assert [sorted(batch) for batch in single] == [sorted(sum(parts, [])) for parts in zip(*shares, strict=True)]
        assert len(single) == n // (world_size * share)


def test_without_the_distributed_sampler_every_process_trains_on_the_same_images(tmp_path):
    from_all = "torch.utils.data.RandomSampler(train_set, generator=torch.Generator().manual_seed(0))"
    shares = batches(run(tmp_path, (SAMPLER, from_all), (SET_EPOCH, "")))
    assert shares[0] == shares[1]


def test_without_the_division_a_step_takes_the_batch_of_one_device_from_every_process(tmp_path, shipped):
    without = run(tmp_path, ("args.batch_size // world_size", "args.batch_size"))
    for result, share in (shipped["ddp_torchrun.py"], BATCH // 2), (without, BATCH):
        assert {len(batch) for rank in batches(result) for batch in rank} == {share}


def test_without_drop_last_the_sampler_repeats_images_to_fill_up_the_shares(tmp_path):
    """4 processes share 1,437 images as 4 x 360 = 1,440, which makes a third batch of 480 that nobody should see."""
    for edits, steps in ([], 2), ([(SAMPLER, "DistributedSampler(train_set, seed=args.seed)")], 3):
        shares = batches(run(tmp_path, *edits, nproc=4, options=["--batch-size", 480]))
        dealt = [index for share in shares for batch in share for index in batch]
        assert len(dealt) == 480 * steps
        assert len(dealt) - len(set(dealt)) == (0 if steps == 2 else 3)


def test_without_drop_last_the_loader_trains_on_a_smaller_last_batch(tmp_path, shipped):
    without = run(tmp_path, ("sampler=sampler, drop_last=True)", "sampler=sampler)"), epochs=2)
    for result, steps in (shipped["ddp_torchrun.py"], STEPS), (without, STEPS + 1):
        assert {len(share) for share in batches(result)} == {2 * steps}


def test_without_the_seed_the_sampler_deals_in_the_same_order_whatever_the_seed_of_the_run(tmp_path):
    for edits, same in ([], False), ([(SAMPLER, "DistributedSampler(train_set, drop_last=True)")], True):
        first, second = (batches(run(tmp_path, *edits, options=["--seed", seed])) for seed in (0, 7))
        assert (first == second) == same


def test_evaluation_counts_each_test_image_once_whatever_their_number_and_that_of_processes():
    """The shipped line, for every n from 1 to 50 and N from 1 to 8; the stock sampler pads and counts some twice."""
    [line] = [line for line in (ROOT / "ddp_torchrun.py").read_text().splitlines() if "test_loader = " in line]
    compared = padded = 0
    for n in range(1, 51):
        for world_size in range(1, 9):
            counted, stock = [], []
            for rank in range(world_size):
                names = {"DataLoader": DataLoader, "args": SimpleNamespace(batch_size=4), "test_set": list(range(n))}
                names |= {"rank": rank, "world_size": world_size}
                exec(line.strip(), names, names)
                counted += [image for batch in names["test_loader"] for image in batch.tolist()]
                stock += DistributedSampler(range(n), world_size, rank, shuffle=False)
            assert sorted(counted) == list(range(n))
            assert len(stock) == -(-n // world_size) * world_size
            compared, padded = compared + 1, padded + (len(stock) > n)
    assert compared == 400 and padded == sum(n % world_size > 0 for n in range(1, 51) for world_size in range(1, 9))


def test_without_its_own_part_of_the_test_images_each_process_counts_all(tmp_path, shipped):
    without = run(tmp_path, (", sampler=range(rank, len(test_set), world_size)", ""))
    for result, counted in (shipped["ddp_torchrun.py"], 360), (without, 720):
        assert {epoch[3] for epoch in totals(result)} == {counted}


# Without this no gradients would be averaged, and the replicas would drift apart.
# Without the wrapper in this call backward() would average no gradients.


@pytest.mark.parametrize("script", ["ddp_mp_spawn.py", "ddp_torchrun.py"])
def test_without_the_wrapper_in_the_call_the_replicas_drift_apart(script, tmp_path, shipped):
    without = run(tmp_path, ("ddp_model(images)", "model(images)"), script=script, epochs=2)
    for result, equal in (shipped[script], True), (without, False):
        first, second = weights(result)
        assert len(first) == 2 and [a == b for a, b in zip(first, second, strict=True)] == [equal] * 2


def test_the_wrapper_gives_every_process_the_weights_of_rank_0_however_they_were_seeded(tmp_path, shipped):
    """Two ranks that start from other weights stay apart for ever if only their gradients are averaged."""
    seeds = ("torch.manual_seed(args.seed)", "torch.manual_seed(args.seed + rank)")
    first, second = weights(run(tmp_path, seeds))
    assert first == second == weights(shipped["ddp_torchrun.py"])[0][:1]


# Without this every epoch would deal the images in the same order.


def test_without_set_epoch_the_order_repeats(tmp_path, shipped):
    without = run(tmp_path, (SET_EPOCH, ""), epochs=2)
    for result, repeats in (shipped["ddp_torchrun.py"], False), (without, True):
        for share in batches(result):
            assert (share[:STEPS] == share[STEPS:]) == repeats


# Without this sum rank 0 would report the loss and accuracy of its own shard.


def test_without_all_reduce_rank_0_reports_its_own_share(tmp_path, shipped):
    without = run(tmp_path, ("        dist.all_reduce(totals)\n", ""))
    for result, part in (shipped["ddp_torchrun.py"], 1), (without, 2):
        assert totals(result)[0][1::2] == [BATCH * STEPS // part, 360 // part]


# Without this condition every process would print the line, and write the same file.


def test_without_the_condition_every_process_prints_and_saves(tmp_path, shipped):
    condition = ("        if rank == 0:\n            report_epoch(", "        if True:\n            report_epoch(")
    for result, times in (shipped["ddp_torchrun.py"], 1), (run(tmp_path, condition), 2):
        assert result.stdout.count("epoch 1/") == result.stdout.count("not saved") == times


# Without this NCCL would warn at exit, and gloo's threads would outlive the training.


def test_without_destroy_process_group_the_group_outlives_the_training(tmp_path, shipped):
    without = run(tmp_path, ("    dist.destroy_process_group()\n", ""))
    for result, open_group in (shipped["ddp_torchrun.py"], False), (without, True):
        ends = [record["group"] for rank in result.seen for record in rank if record["what"] == "end"]
        assert ends == [open_group] * 2
