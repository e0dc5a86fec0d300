"""What DistributedDataParallel does, shown on real processes with the model and the data of the scripts."""

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from tests.models import flat, gradients, model_and_batch
from tests.processes import run_ranks


def weights_at_start(rank, wrap):
    model, _, _ = model_and_batch(seed=rank, rank=rank)
    if wrap:
        DistributedDataParallel(model)
    return flat(model.parameters())


@pytest.mark.parametrize("wrap", [True, False])
def test_replicas_start_equal_though_they_were_seeded_differently(wrap, tmp_path):
    first, second = run_ranks(tmp_path, weights_at_start, wrap)
    assert torch.equal(first, second) == wrap


def local_averaged_and_whole(rank, nproc, reduction):
    """The gradients of this rank's 6 images before and after it is wrapped, and those of the images of all ranks."""
    torch.set_default_dtype(torch.float64)
    model, *batch = model_and_batch(0, rank)
    whole = gradients(*model_and_batch(0, 0, size=6 * nproc), reduction)
    return gradients(model, *batch, reduction), gradients(DistributedDataParallel(model), *batch, reduction), whole


@pytest.fixture(scope="module", params=[2, 4])
def of_each_rank(request, tmp_path_factory):
    nproc = request.param
    return run_ranks(tmp_path_factory.mktemp("gradients"), local_averaged_and_whole, nproc, "mean", nproc=nproc)


def test_the_gradient_is_the_mean_of_the_local_gradients(of_each_rank):
    """By hand: sum the gradients that each rank found alone, divide by their number."""
    by_hand = sum(local for local, _, _ in of_each_rank) / len(of_each_rank)
    for local, averaged, _ in of_each_rank:
        torch.testing.assert_close(averaged, by_hand, rtol=1e-12, atol=1e-15)
        assert (averaged - local).norm() > 0.1 * local.norm()


def test_the_mean_of_the_gradients_of_equal_shards_is_the_gradient_of_the_global_batch(of_each_rank):
    for _, averaged, whole in of_each_rank:
        torch.testing.assert_close(averaged, whole, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("nproc", [2, 3])
def test_a_summed_loss_has_gradients_n_times_too_small(nproc, tmp_path):
    for _, averaged, whole in run_ranks(tmp_path, local_averaged_and_whole, nproc, "sum", nproc=nproc):
        torch.testing.assert_close(averaged, whole / nproc, rtol=1e-12, atol=1e-14)


def all_reduces(rank):
    """How many a backward pass makes, and how many the step of the optimizer."""
    model, images, labels = model_and_batch(0, rank)
    ddp_model, optimizer = DistributedDataParallel(model), torch.optim.SGD(model.parameters(), 0.1)
    counts, buckets = [], []
    ddp_model.register_comm_hook(None, lambda _, bucket: (buckets.append(bucket), allreduce_hook(None, bucket))[1])
    for work in (lambda: gradients(ddp_model, images, labels)), optimizer.step:
        buckets.clear()
        work()
        counts.append(len(buckets))
    return counts


def test_backward_makes_the_all_reduce_and_the_optimizer_makes_none(tmp_path):
    for in_backward, in_step in run_ranks(tmp_path, all_reduces):
        assert in_backward >= 1 and in_step == 0
