"""The default model, seeded, in the processes of a test, its gradients, and what is said where replicas differ."""

import torch
import torch.nn.functional as F

from common.data import load_data
from common.model import build_model

WHY = (
    "{} on {} processes does not train what single_gpu.py trains. Causes, if you changed common/model.py or "
    "common/data.py: a layer that looks across the batch (BatchNorm: take GroupNorm), one that draws random numbers "
    "(dropout: other processes draw others), or data that each rank reads in its own way (seed it with args.seed)"
)


def model_and_batch(seed, rank, size=6):
    """The default model, seeded, and this rank's images and labels: the first `size` for rank 0, then the next."""
    torch.manual_seed(seed)
    train_set, _ = load_data("digits", None)
    images, labels = train_set[rank * size : (rank + 1) * size]
    return build_model("cnn", train_set), images, labels


def flat(tensors):
    """All values of some tensors, in one."""
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def gradients(model, images, labels):
    """The gradients of all parameters, in one tensor, after one forward and one backward pass."""
    model.zero_grad()
    F.cross_entropy(model(images), labels).backward()
    return flat(parameter.grad for parameter in model.parameters()).clone()
