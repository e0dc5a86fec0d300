"""What is often believed of DistributedDataParallel, settled by experiment: a test for each row of the README's table.

The rows that are not here have their tests in test_exactness.py, test_lines.py, test_mechanism.py and test_timeline.py.
"""

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from common.model import count_correct
from tests.conftest import newest
from tests.models import gradients, model_and_batch
from tests.processes import run_ranks

# DDP makes a model fit that is too large for one device.


def bytes_held(rank, wrap):
    """After one step: bytes of the parameters, of their gradients and of what the optimizer keeps for them."""
    model, images, labels = model_and_batch(0, rank)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    gradients(DistributedDataParallel(model) if wrap else model, images, labels)
    optimizer.step()
    parameters = list(model.parameters())
    momenta = [optimizer.state[parameter]["momentum_buffer"] for parameter in parameters]
    kinds = parameters, [parameter.grad for parameter in parameters], momenta
    return [sum(tensor.nbytes for tensor in kind) for kind in kinds]


@pytest.mark.parametrize(("wrap", "nproc"), [(False, 1), (True, 3)])
def test_each_process_holds_all_parameters_gradients_and_momenta_however_many_there_are(wrap, nproc, tmp_path):
    assert run_ranks(tmp_path, bytes_held, wrap, nproc=nproc) == [[4 * 58634] * 3] * nproc  # float32


def bytes_behind_gradients(rank, view):
    """Of each gradient, and of the memory that it is a part of."""
    layer = torch.nn.Linear(4, 3)
    ddp_model = DistributedDataParallel(layer, gradient_as_bucket_view=view)
    ddp_model(torch.ones(2, 4)).sum().backward()
    return [(gradient.nbytes, gradient.untyped_storage().nbytes()) for gradient in (layer.weight.grad, layer.bias.grad)]


@newest
@pytest.mark.parametrize(("view", "memory"), [(False, [48, 12]), (True, [48 + 12] * 2)])
def test_gradients_and_buckets_are_the_same_memory_only_if_asked_for(view, memory, tmp_path):
    assert run_ranks(tmp_path, bytes_behind_gradients, view) == [list(zip([48, 12], memory, strict=True))] * 2


# DDP copies the parameters in each step.


def train_from_biases_one_apart(rank):
    torch.set_default_dtype(torch.float64)
    model, images, labels = model_and_batch(0, rank)
    ddp_model = DistributedDataParallel(model)
    bias = model[-1].bias.detach()
    bias += rank  # after the wrapper has made them equal
    before = bias.clone()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for _ in range(3):
        gradients(ddp_model, images, labels)
        optimizer.step()
    return before, bias


def test_weights_that_differ_stay_as_far_apart_for_only_gradients_are_averaged(tmp_path):
    (before, first), (_, second) = run_ranks(tmp_path, train_from_biases_one_apart)
    assert (first - before).abs().max() > 0.01, "they were trained"
    torch.testing.assert_close(second - first, torch.ones(10, dtype=torch.float64), rtol=0, atol=1e-12)


def buffer_before_and_after_forward(rank):
    layer = torch.nn.BatchNorm1d(3).eval()  # which leaves its buffers alone
    ddp_model = DistributedDataParallel(layer)
    layer.running_mean.fill_(rank + 1)
    before = layer.running_mean.tolist()
    ddp_model(torch.zeros(2, 3))
    return before, layer.running_mean.tolist()


def test_buffers_are_taken_from_rank_0_before_each_forward_pass(tmp_path):
    assert run_ranks(tmp_path, buffer_before_and_after_forward) == [([1] * 3, [1] * 3), ([2] * 3, [1] * 3)]


# BatchNorm sees the global batch.


def normalised_shard(rank):
    """What BatchNorm and GroupNorm make of this rank's half of twelve rows, and of all twelve."""
    rows = torch.randn(12, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    layers = torch.nn.BatchNorm1d(4).double(), torch.nn.GroupNorm(2, 4).double()
    shards = [DistributedDataParallel(layer)(rows[6 * rank :][:6]).detach() for layer in layers]
    return rows, shards, [layer(rows)[6 * rank :][:6].detach() for layer in layers]


def test_batchnorm_normalises_by_the_shard_of_its_process_and_groupnorm_does_not_care(tmp_path):
    for rank, (rows, shards, parts_of_whole) in enumerate(run_ranks(tmp_path, normalised_shard)):
        own = rows[6 * rank :][:6]
        by_hand = (own - own.mean(0)) / (own.var(0, unbiased=False) + 1e-5).sqrt()
        torch.testing.assert_close(shards[0], by_hand)
        assert (shards[0] - parts_of_whole[0]).abs().max() > 0.1
        torch.testing.assert_close(shards[1], parts_of_whole[1])


# The mean of the accuracies is the accuracy.


def test_the_mean_of_the_accuracies_of_unequal_shards_is_not_the_accuracy():
    """A network that returns its input is right in 0, 2 and 4 of five images, 1 and 3 make the other shard."""
    data = list(zip(torch.eye(2)[[0] * 5], torch.tensor([0, 1, 0, 1, 0]), strict=True))
    loaders = [DataLoader(data, 5, sampler=range(rank, 5, 2)) for rank in (0, 1)]  # as in the scripts
    counts = [count_correct(torch.nn.Identity(), loader, "cpu") for loader in loaders]
    assert [count.tolist() for count in counts] == [[3, 3], [0, 2]] and sum(counts).tolist() == [3, 5]
