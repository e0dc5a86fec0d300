"""What is counted on the test images."""

import torch


@torch.no_grad()
def count_correct(model, test_loader, device):
    """Count the images of test_loader that the model gives their label.

    Args:
        model (nn.Module): from images (batch, channels, height, width) to logits (batch, classes).
        test_loader (iterable): of images and labels (batch,); may be empty.
    Returns:
        Tensor: float64 (2,) on device: correct images, images.
    """
    counts = torch.zeros(2, dtype=torch.float64, device=device)
    model.eval()
    for images, labels in test_loader:
        images, labels = images.to(device), labels.to(device)
        counts[0] += (model(images).argmax(1) == labels).sum()
        counts[1] += len(labels)
    model.train()
    return counts
