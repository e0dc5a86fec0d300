"""The models: no layer looks across the batch (GroupNorm, not BatchNorm), none draws random numbers (no dropout)."""

import torch.nn as nn


class Scale(nn.Module):
    """Pixels to floating point: uint8 from 0 to 255 to the default dtype from 0 to 1, any shape."""

    def forward(self, images):
        return images / 255


def build_model(args, train_set, classes=10):
    """Build the model that the options name, for images of train_set's size.

    Returns:
        nn.Module: from uint8 images (batch, channels, height, width) to logits (batch, classes).
    """
    channels = train_set[0][0].shape[0]
    return {"cnn": _cnn, "resnet18": _resnet18}[args.model](channels, classes)


def _cnn(channels, classes):
    return nn.Sequential(
        Scale(),
        nn.Conv2d(channels, 32, 3, padding=1), nn.GroupNorm(8, 32), nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1), nn.GroupNorm(8, 64), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(64, 64, 3, padding=1), nn.GroupNorm(8, 64), nn.ReLU(), nn.AdaptiveAvgPool2d(2),
        nn.Flatten(), nn.Linear(64 * 2 * 2, classes),
    )  # fmt: skip


def _resnet18(channels, classes):
    """torchvision's ResNet-18 with GroupNorm, and for small images a 3x3 stem that keeps their size."""
    from torchvision.models import resnet18

    model = resnet18(num_classes=classes, norm_layer=lambda width: nn.GroupNorm(32, width))
    model.conv1 = nn.Sequential(Scale(), nn.Conv2d(channels, 64, 3, padding=1, bias=False))
    model.maxpool = nn.Identity()
    return model
