"""The data sets: uint8 images in memory, of which a batch is one indexing operation."""

import contextlib
import gzip
import os
import socket
from pathlib import Path
from typing import NamedTuple

import torch
from filelock import FileLock
from torch.utils.data import Dataset
from torch.utils.data._utils.collate import default_collate_fn_map

from common.errors import refuse

# Optical Recognition of Handwritten Digits, E. Alpaydin and C. Kaynak, UCI Machine Learning Repository, 1998,
# https://doi.org/10.24432/C50P49, licence CC BY 4.0: 1,797 rows of 64 pixels from 0 to 16 and the label.
DIGITS = Path(__file__).parent / "digits.csv.gz"


class Batch(NamedTuple):
    """A whole batch: images, uint8 (batch, channels, height, width), and labels, int64 (batch,)."""

    images: torch.Tensor
    labels: torch.Tensor


# DataLoader asks __getitems__ for a list of samples and stacks them; a list of one Batch is already stacked.
default_collate_fn_map[Batch] = lambda batches, collate_fn_map=None: batches[0]


class ImageSet(Dataset):
    """Images in memory: uint8 (n, channels, height, width), and their labels: int64 (n,)."""

    def __init__(self, images, labels):
        self.images, self.labels = images, labels

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.images[index], self.labels[index]

    def __getitems__(self, indices):
        indices = torch.tensor(indices)
        return [Batch(*(part.index_select(0, indices) for part in (self.images, self.labels)))]


def load_data(args):
    """Load the data set that the options name.

    Returns:
        (ImageSet, ImageSet): training set and test set.
    Raises:
        SystemExit: the files can be neither read nor downloaded.
    """
    return _load_digits() if args.dataset == "digits" else _load_torchvision(args)


def _load_digits():
    with gzip.open(DIGITS, "rt") as file:
        rows = torch.tensor([[int(value) for value in line.split(",")] for line in file])
    images, labels = (rows[:, :64] * 255 // 16).to(torch.uint8).view(-1, 1, 8, 8), rows[:, 64]
    test = torch.arange(len(rows)) % 5 == 0
    return ImageSet(images[~test], labels[~test]), ImageSet(images[test], labels[test])


def _load_torchvision(args):
    """Fashion-MNIST or CIFAR-10 from --data-root, downloaded at first use by one process while the others wait."""
    from torchvision import datasets

    kind, folder, files = {
        "fashion-mnist": (datasets.FashionMNIST, "FashionMNIST/raw", "{train,t10k}-{images-idx3,labels-idx1}-ubyte.gz"),
        "cifar10": (datasets.CIFAR10, "cifar-10-batches-py", "data_batch_1 to 5, test_batch and batches.meta"),
    }[args.dataset]
    if os.path.exists(args.data_root) and not os.path.isdir(args.data_root):
        refuse(args, f"--data-root {args.data_root} is not a folder; name one, or one that can be made")
    folder, lock = args.data_root / folder, args.data_root / f".{args.dataset}.lock"
    missing = [path for path in (folder, *folder.parents) if not os.path.exists(path)]
    timeout = socket.getdefaulttimeout()
    try:
        args.data_root.mkdir(parents=True, exist_ok=True)
        writable = os.access(args.data_root, os.W_OK)
        with FileLock(lock) if writable else contextlib.nullcontext():
            archives = [path for path in folder.glob("*.gz") if not path.with_suffix("").exists()]
            for path, data in [(path, gzip.decompress(path.read_bytes())) for path in archives]:
                path.with_suffix("").write_bytes(data)
            socket.setdefaulttimeout(60)  # seconds; the download sets none, and would wait for ever
            parts = [kind(args.data_root, train=train, download=True) for train in (True, False)]
        return [_from_torchvision(part) for part in parts]
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        for remove in [lock.unlink, *(path.rmdir for path in missing)]:  # what this made; rmdir only if it is empty
            with contextlib.suppress(OSError):
                remove()
    finally:
        socket.setdefaulttimeout(timeout)
    refuse(
        args,
        f"{args.dataset} cannot be read or downloaded ({reason}); "
        f"put {files} into {folder}, or delete that folder to download it anew",
    )


def _from_torchvision(dataset):
    images = torch.as_tensor(dataset.data)
    images = images.unsqueeze(1) if images.dim() == 3 else images.permute(0, 3, 1, 2)
    return ImageSet(images, torch.as_tensor(dataset.targets))
