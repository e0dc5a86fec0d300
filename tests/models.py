"""The default model, seeded, in the processes of a test, and its gradients."""

import torch
import torch.nn.functional as F

from common.data import load_data
from common.model import build_model


def model_and_batch(seed, rank, size=6):
    """The default model, seeded, and this rank's images and labels: the first `size` for rank 0, then the next."""
    torch.manual_seed(seed)
    train_set, _ = load_data("digits", None)
    images, labels = train_set[rank * size : (rank + 1) * size]
    return build_model("cnn", train_set), images, labels


def flat(tensors):
    """All values of some tensors, in one."""
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def gradients(model, images, labels, reduction="mean"):
    """The gradients of all parameters, in one tensor, after one forward and one backward pass."""
    model.zero_grad()
    F.cross_entropy(model(images), labels, reduction=reduction).backward()
    return flat(parameter.grad for parameter in model.parameters()).clone()
