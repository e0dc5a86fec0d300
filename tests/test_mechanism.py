"""What DistributedDataParallel does, shown on real processes with the model and the data of the scripts."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from common.data import load_data
from common.model import build_model
from tests.processes import run_ranks

ARGS = SimpleNamespace(dataset="digits", model="cnn")


def model_and_batch(seed, rank, size=6):
    """The default model, seeded, and this rank's images and labels: the first `size` for rank 0, then the next."""
    torch.manual_seed(seed)
    train_set, _ = load_data(ARGS)
    model = build_model(ARGS, train_set)
    images, labels = train_set.images[rank * size :][:size], train_set.labels[rank * size :][:size]
    return model, images, labels


def flat(tensors):
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def gradients(model, images, labels):
    model.zero_grad()
    F.cross_entropy(model(images), labels).backward()
    return flat(parameter.grad for parameter in model.parameters()).clone()


def start(rank, wrap):
    model, _, _ = model_and_batch(rank, rank)
    if wrap:
        DistributedDataParallel(model)
    return flat(model.parameters())


def test_replicas_start_equal_though_they_were_seeded_differently(tmp_path):
    for wrap in True, False:
        first, second = run_ranks(tmp_path, start, wrap)
        assert torch.equal(first, second) == wrap


def local_and_averaged(rank):
    torch.set_default_dtype(torch.float64)
    model, images, labels = model_and_batch(0, rank)
    local = gradients(model, images, labels)
    averaged = gradients(DistributedDataParallel(model), images, labels)
    return local, averaged


@pytest.mark.parametrize("nproc", [2, 4])
def test_the_gradient_is_the_mean_of_the_local_gradients(nproc, tmp_path):
    """By hand: sum the gradients that each rank found alone, divide by their number."""
    results = run_ranks(tmp_path, local_and_averaged, nproc=nproc)
    by_hand = sum(local for local, _ in results) / nproc
    for local, averaged in results:
        torch.testing.assert_close(averaged, by_hand, rtol=1e-12, atol=1e-15)
        assert (averaged - local).norm() > 0.1 * local.norm()


def test_the_mean_of_the_gradients_of_equal_shares_is_the_gradient_of_the_whole_batch(tmp_path):
    [[whole, _]] = run_ranks(tmp_path, whole_batch, nproc=1)
    for _, averaged in run_ranks(tmp_path, local_and_averaged, nproc=2):
        torch.testing.assert_close(averaged, whole, rtol=1e-12, atol=1e-15)


def whole_batch(rank):
    torch.set_default_dtype(torch.float64)
    model, images, labels = model_and_batch(0, rank, size=12)
    return gradients(model, images, labels), rank


def train_two_steps(rank, wrap):
    model, images, labels = model_and_batch(0, rank)
    called = DistributedDataParallel(model) if wrap else model
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    weights = []
    for _ in range(2):
        gradients(called, images, labels)
        optimizer.step()
        weights.append(flat(model.parameters()))
    return weights


def test_after_each_step_all_ranks_hold_the_same_weights_and_without_ddp_they_drift_apart(tmp_path):
    for wrap in True, False:
        first, second = run_ranks(tmp_path, train_two_steps, wrap)
        assert [torch.equal(a, b) for a, b in zip(first, second, strict=True)] == [wrap, wrap]


def backward_then_step(rank):
    model, images, labels = model_and_batch(0, rank)
    local = gradients(model, images, labels)
    averaged = gradients(DistributedDataParallel(model), images, labels)
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        torch.optim.SGD(model.parameters(), 0.1).step()
    exchanges = sum("all_reduce" in event.name or "allreduce" in event.name for event in trace.events())
    return local, averaged, exchanges


def test_the_exchange_is_made_by_backward_and_none_by_the_optimizer(tmp_path):
    for local, averaged, exchanges_in_step in run_ranks(tmp_path, backward_then_step):
        assert not torch.equal(local, averaged)
        assert exchanges_in_step == 0


def timeline(rank, bucket_cap_mb):
    """Of one step: starts of the all-reduces, and the ends of the backward computations of the layers."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(8)])
    ddp_model = DistributedDataParallel(model, bucket_cap_mb=bucket_cap_mb)
    data = torch.randn(256, 512)
    for step in range(3):  # the first step lays the buckets out anew
        with profile(activities=[ProfilerActivity.CPU]) as trace:
            ddp_model(data).sum().backward()
    events = trace.events()
    starts = [event.time_range.start for event in events if event.name == "gloo:all_reduce"]
    ends = [event.time_range.end for event in events if event.name == "AddmmBackward0"]
    return sorted(starts), sorted(ends)


def test_the_first_bucket_is_exchanged_before_the_backward_pass_has_ended(tmp_path):
    for starts, ends in run_ranks(tmp_path, timeline, 1):  # MB; a layer has one
        assert len(starts) > 4 and len(ends) == 8
        assert starts[0] < ends[-1]


def test_with_one_huge_bucket_the_exchange_waits_for_the_end_of_the_backward_pass(tmp_path):
    for starts, ends in run_ranks(tmp_path, timeline, 1000):
        assert len(starts) == 1 and len(ends) == 8
        assert starts[0] > ends[-1]


def test_every_process_holds_the_whole_model(tmp_path):
    counts = run_ranks(tmp_path, parameters_held, nproc=3)
    assert counts == [58634] * 3 == [sum(p.numel() for p in model_and_batch(0, 0)[0].parameters())] * 3


def parameters_held(rank):
    model, _, _ = model_and_batch(0, rank)
    assert dist.get_world_size() == 3
    return sum(parameter.numel() for parameter in DistributedDataParallel(model).parameters())
