"""The models, which look across no batch (GroupNorm, not BatchNorm) and draw no random numbers (no dropout)."""

import torch
import torch.nn as nn


class Scale(nn.Module):
    """Pixels to floating point: uint8 from 0 to 255 to the default dtype from 0 to 1, any shape."""

    def forward(self, images):
        return images / 255


def build_model(name, train_set, classes=10):
    """Build cnn or resnet18: images like those of train_set (batch, channels, height, width) to (batch, classes)."""
    channels = train_set[0][0].shape[0]
    if name == "resnet18":
        from torchvision.models import resnet18

        model = resnet18(num_classes=classes, norm_layer=lambda width: nn.GroupNorm(32, width))
        model.conv1 = nn.Sequential(Scale(), nn.Conv2d(channels, 64, 3, padding=1, bias=False))  # for small images
        model.maxpool = nn.Identity()
        return model
    return nn.Sequential(
        Scale(),
        nn.Conv2d(channels, 32, 3, padding=1), nn.GroupNorm(8, 32), nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1), nn.GroupNorm(8, 64), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(64, 64, 3, padding=1), nn.GroupNorm(8, 64), nn.ReLU(), nn.AdaptiveAvgPool2d(2),
        nn.Flatten(), nn.Linear(64 * 2 * 2, classes),
    )  # fmt: skip


@torch.no_grad()
def count_correct(model, test_loader, device):
    """Return float64 (2,) on device: the test images that the model, in eval mode, labels right, and all of them."""
    counts = torch.zeros(2, dtype=torch.float64, device=device)
    training = [module for module in model.modules() if module.training]
    model.eval()
    for images, labels in test_loader:
        images, labels = images.to(device), labels.to(device)
        counts[0] += (model(images).argmax(1) == labels).sum()
        counts[1] += len(labels)
    for module in training:  # what was frozen stays so
        module.training = True
    return counts
