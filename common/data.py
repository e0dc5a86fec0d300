"""The data sets: uint8 images in memory, of which a batch is one indexing operation."""

import contextlib
import gzip
import os
import socket
from pathlib import Path

import torch
from filelock import FileLock
from torch.utils.data import TensorDataset
from torch.utils.data._utils.collate import default_collate_fn_map

from common.report import exit_with_error

# Optical Recognition of Handwritten Digits, E. Alpaydin and C. Kaynak, UCI Machine Learning Repository, 1998,
# https://doi.org/10.24432/C50P49, licence CC BY 4.0: 1,797 rows of 64 pixels from 0 to 16 and the label.
DIGITS = Path(__file__).parent / "digits.csv.gz"


class ImageSet(TensorDataset):
    """Images in memory, uint8 (n, channels, height, width), and their labels, int64 (n,)."""

    def __getitems__(self, indices):
        return [Batch(self[torch.tensor(indices)])]


class Batch(tuple):
    """A whole batch of images and labels, where DataLoader asks for a list of samples, to stack them."""


default_collate_fn_map[Batch] = lambda batches, collate_fn_map=None: batches[0]


def load_data(name, root):
    """Load digits, fashion-mnist or cifar10, the last two from the folder root, downloaded at first use.

    Returns two ImageSets, for training and test; exits if the files can be neither read nor downloaded.
    """
    if name != "digits":
        return _load_torchvision(name, root)
    with gzip.open(DIGITS, "rt") as file:
        rows = torch.tensor([[int(value) for value in line.split(",")] for line in file])
    images, labels = (rows[:, :64] * 255 // 16).to(torch.uint8).view(-1, 1, 8, 8), rows[:, 64]
    test = torch.arange(len(rows)) % 5 == 0
    return ImageSet(images[~test], labels[~test]), ImageSet(images[test], labels[test])


def _load_torchvision(name, root):
    from torchvision import datasets

    kind, folder, files = {
        "fashion-mnist": (datasets.FashionMNIST, "FashionMNIST/raw", "{train,t10k}-{images-idx3,labels-idx1}-ubyte.gz"),
        "cifar10": (datasets.CIFAR10, "cifar-10-batches-py", "data_batch_1 to 5, test_batch and batches.meta"),
    }[name]
    if os.path.exists(root) and not os.path.isdir(root):
        exit_with_error(f"--data-root {root} is not a folder; name one, or one that can be made")
    folder, lock = root / folder, root / f".{name}.lock"
    missing = [path for path in (folder, *folder.parents) if not os.path.exists(path)]
    timeout = socket.getdefaulttimeout()
    try:
        root.mkdir(parents=True, exist_ok=True)
        with FileLock(lock) if os.access(root, os.W_OK) else contextlib.nullcontext():  # one process downloads
            archives = [path for path in folder.glob("*.gz") if not path.with_suffix("").exists()]
            for path, data in [(path, gzip.decompress(path.read_bytes())) for path in archives]:
                path.with_suffix("").write_bytes(data)
            socket.setdefaulttimeout(60)  # seconds; the download sets none, and would wait for ever
            return [_from_torchvision(kind(root, train=train, download=True)) for train in (True, False)]
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        for remove in [lock.unlink, *(path.rmdir for path in missing)]:  # what this made; rmdir only if it is empty
            with contextlib.suppress(OSError):
                remove()
    finally:
        socket.setdefaulttimeout(timeout)
    way_out = f"put {files} into {folder}, or delete that folder to download it anew"
    exit_with_error(f"{name} cannot be read or downloaded ({reason}); {way_out}")


def _from_torchvision(dataset):
    images = torch.as_tensor(dataset.data)  # (n, height, width) or (n, height, width, channels)
    images = images.view(*images.shape[:3], -1).permute(0, 3, 1, 2)
    return ImageSet(images, torch.as_tensor(dataset.targets))
