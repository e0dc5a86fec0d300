"""The data sets and the models: what is in them, how a batch is taken, and files that are there, missing or damaged."""

import csv
import functools
import gzip
import hashlib
import http.server
import re
import socket
import threading
from collections import Counter
from types import SimpleNamespace

import numpy
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, default_collate

from common.data import DIGITS, ImageSet, _from_torchvision, load_data
from common.model import Scale, build_model
from tests.processes import SCRIPTS, edited, in_process, run_ranks, run_script

# The digits


def test_every_fifth_row_is_a_test_image_and_all_others_are_training_images_scaled_so_that_white_is_255():
    with gzip.open(DIGITS, "rt", newline="") as file:  # read by other means than load_data
        rows = [[int(value) for value in row] for row in csv.reader(file)]
    train_set, test_set = load_data("digits", None)
    assert (len(train_set), len(test_set)) == (1437, 360)
    for part, expected in (test_set, rows[::5]), (train_set, [row for number, row in enumerate(rows) if number % 5]):
        images, labels = part.tensors
        assert images.dtype == torch.uint8 and images.shape == (len(part), 1, 8, 8) and labels.dtype == torch.int64
        assert images.flatten(1).tolist() == [[pixel * 255 // 16 for pixel in row[:64]] for row in expected]
        assert labels.tolist() == [row[64] for row in expected] and set(labels.tolist()) == set(range(10))


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_run_on_the_digits_never_imports_torchvision(script, tmp_path):
    last = "        seconds = time.perf_counter() - start\n"
    path = edited(tmp_path, script, (last, f"{last}        import sys; print('torchvision' in sys.modules)\n"))
    run = run_script(tmp_path, path, "--epochs", 1, "--batch-size", 480)
    assert run.status == 0 and "\nFalse\n" in run.stdout, run.stderr


# A batch


def some_images(count=10):
    images = torch.randint(256, (count, 1, 2, 2), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return ImageSet(images, torch.arange(count))


def test_a_batch_is_taken_in_one_indexing_operation_and_equals_its_samples_stacked():
    data, indices = some_images(), [7, 0, 3, 3]
    with torch.profiler.profile() as profiler:
        [batch] = DataLoader(data, batch_sampler=[indices])
    operations = [event.name for event in profiler.events()]
    assert operations.count("aten::index") == 2  # the images, and the labels
    assert not {"aten::select", "aten::stack", "aten::cat"} & {*operations}
    for taken, stacked in zip(batch, default_collate([data[index] for index in indices]), strict=True):
        assert taken.dtype == stacked.dtype and torch.equal(taken, stacked)


def test_worker_processes_yield_the_same_batches():
    here, there = (list(DataLoader(some_images(), 4, num_workers=workers)) for workers in (0, 1))
    assert [len(labels) for _, labels in there] == [4, 4, 2] and str(here) == str(there)


# Files in torchvision's layout


@functools.cache
def small_fashion():
    """For each of the four files an array, of 6 training and 3 test images."""
    random, arrays = numpy.random.default_rng(0), {}
    for part, count in ("train", 6), ("t10k", 3):
        arrays[f"{part}-images-idx3-ubyte"] = random.integers(256, size=(count, 28, 28), dtype=numpy.uint8)
        arrays[f"{part}-labels-idx1-ubyte"] = random.integers(10, size=count, dtype=numpy.uint8)
    return arrays


def write_fashion(root, suffix=""):
    """Write the four files, compressed if the suffix is .gz: 0, 0, 8 for bytes, dimensions, each size, the data."""
    folder = root / "FashionMNIST/raw"
    folder.mkdir(parents=True)
    for name, array in small_fashion().items():
        data = bytes([0, 0, 8, array.ndim]) + numpy.array(array.shape, ">i4").tobytes() + array.tobytes()
        (folder / (name + suffix)).write_bytes(gzip.compress(data) if suffix else data)
    return folder


def assert_small_fashion(root):
    for part, data in zip(("train", "t10k"), load_data("fashion-mnist", root), strict=True):
        images, labels = data.tensors
        assert numpy.array_equal(images.numpy(), small_fashion()[f"{part}-images-idx3-ubyte"][:, None])
        assert labels.dtype == torch.int64 and labels.tolist() == small_fashion()[f"{part}-labels-idx1-ubyte"].tolist()


def contents(folder):
    """For each path below a folder the bytes of a file, None for a folder."""
    return {path.relative_to(folder): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


@pytest.fixture
def no_network(monkeypatch):
    """Downloads go to a port of this machine at which nobody listens, but which is taken, so that nobody gets it."""
    from torchvision.datasets import CIFAR10, FashionMNIST

    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{bound.getsockname()[1]}/"
        monkeypatch.setattr(FashionMNIST, "mirrors", [address])
        monkeypatch.setattr(CIFAR10, "url", address)
        yield


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_files_put_there_by_hand_are_used_without_a_network(suffix, tmp_path, no_network):
    write_fashion(tmp_path, suffix)
    assert_small_fashion(tmp_path)


def test_files_that_were_unpacked_by_hand_count_more_than_the_archive_beside_them(tmp_path):
    (write_fashion(tmp_path) / "train-images-idx3-ubyte.gz").write_bytes(b"junk")
    assert_small_fashion(tmp_path)


def test_images_with_their_channels_last_are_turned_around():
    """As torchvision holds CIFAR-10: (n, height, width, channels), and labels in a list."""
    pixels = numpy.random.default_rng(0).integers(256, size=(2, 32, 32, 3), dtype=numpy.uint8)
    images, labels = _from_torchvision(SimpleNamespace(data=pixels, targets=[3, 9])).tensors
    assert images.shape == (2, 3, 32, 32) and labels.tolist() == [3, 9]
    assert all(numpy.array_equal(images[:, channel], pixels[..., channel]) for channel in range(3))


def test_a_data_root_that_cannot_be_written_to_is_enough_when_the_files_are_there(tmp_path):
    write_fashion(tmp_path / "root")
    before = contents(tmp_path / "root")
    for folder in (tmp_path, *tmp_path.parents)[:3]:
        folder.chmod(0o755)
    (tmp_path / "root").chmod(0o555)
    assert in_process(assert_small_fashion, tmp_path / "stderr", tmp_path / "root", nobody=True) == (0, "")
    assert contents(tmp_path / "root") == before


# Downloading


@pytest.fixture
def server(tmp_path):
    """Serve the small Fashion-MNIST on a free port; `requests` counts how often a file is sent."""
    folder, requests = write_fashion(tmp_path / "served", ".gz"), Counter()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def do_GET(self):
            if self.headers["Method"] != "HEAD":  # torchvision first follows redirections, with this header
                requests[self.path.lstrip("/")] += 1
            super().do_GET()

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=folder)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        server.requests, server.address = requests, f"http://127.0.0.1:{server.server_port}/"
        server.digests = [(file.name, hashlib.md5(file.read_bytes()).hexdigest()) for file in folder.iterdir()]
        yield server
        server.shutdown()


def _download(rank, root, address, digests):
    from torchvision.datasets import FashionMNIST

    FashionMNIST.mirrors, FashionMNIST.resources = [address], digests
    dist.barrier()  # all start at once
    assert_small_fashion(root)


@pytest.mark.parametrize("root", ["empty", "not/there/yet"])
def test_four_processes_that_start_at_once_download_each_file_once(root, tmp_path, server):
    (tmp_path / "empty").mkdir()
    run_ranks(tmp_path, _download, tmp_path / root, server.address, server.digests, nproc=4)
    assert server.requests == {name + ".gz": 1 for name in small_fashion()}


# What goes wrong


def refusal(capsys, dataset, root):
    """The one line with which load_data exits."""
    with pytest.raises(SystemExit) as exit:
        load_data(dataset, root)
    [line] = capsys.readouterr().err.splitlines()
    assert exit.value.code == 2
    return line


FASHION = "fashion-mnist", "{train,t10k}-{images-idx3,labels-idx1}-ubyte.gz", "FashionMNIST/raw"
CIFAR = "cifar10", "data_batch_1 to 5, test_batch and batches.meta", "cifar-10-batches-py"


@pytest.mark.parametrize("exists", [True, False])
@pytest.mark.parametrize("dataset, files, folder", [FASHION, CIFAR])
def test_without_files_and_network_one_line_names_what_to_put_where_and_nothing_is_left(
    dataset, files, folder, exists, tmp_path, no_network, capsys
):
    root = tmp_path / "root"
    if exists:
        root.mkdir()
    line = refusal(capsys, dataset, root)
    assert line.startswith(f"{dataset} cannot be read or downloaded (")
    assert re.search("Connection refused|Error downloading", line)
    assert line.endswith(f"; put {files} into {root}/{folder}, or delete that folder to download it anew")
    assert root.exists() == exists and contents(root) == {}


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_damaged_file_is_one_line_and_left_as_it_was_until_a_whole_archive_takes_its_place(
    suffix, tmp_path, no_network, capsys
):
    damaged = write_fashion(tmp_path, suffix) / f"train-images-idx3-ubyte{suffix}"
    whole = damaged.read_bytes()
    damaged.write_bytes(whole[:500])
    before = contents(tmp_path)
    assert "; put {train,t10k}-" in refusal(capsys, "fashion-mnist", tmp_path)
    assert contents(tmp_path) == before
    damaged.write_bytes(whole)
    assert_small_fashion(tmp_path)


def test_a_data_root_that_is_a_file_or_below_a_folder_of_somebody_else_is_refused(tmp_path, capsys):
    (tmp_path / "file").write_text("mine")
    assert refusal(capsys, "cifar10", tmp_path / "file").startswith(f"--data-root {tmp_path}/file is not a folder")
    assert (tmp_path / "file").read_text() == "mine"
    (tmp_path / "theirs").mkdir(mode=0)
    theirs = "fashion-mnist", tmp_path / "theirs/data"
    status, line = in_process(load_data, tmp_path / "stderr", *theirs, nobody=True)
    assert status == 2 and line.startswith("fashion-mnist cannot be read or downloaded (PermissionError")


def test_a_download_has_sixty_seconds_for_each_answer_and_half_of_one_is_one_line_too(monkeypatch, tmp_path, capsys):
    from torchvision.datasets import FashionMNIST

    def fail(self, root, **options):
        timeouts.append(socket.getdefaulttimeout())
        (root / "FashionMNIST/raw").mkdir(parents=True)
        (root / "FashionMNIST/raw/half").write_bytes(b"half")
        raise KeyError(3)

    timeouts, before = [], socket.getdefaulttimeout()
    monkeypatch.setattr(FashionMNIST, "__init__", fail)
    assert "cannot be read or downloaded (KeyError: 3)" in refusal(capsys, "fashion-mnist", tmp_path / "data")
    assert timeouts == [60] and socket.getdefaulttimeout() == before
    assert (tmp_path / "data/FashionMNIST/raw/half").exists()


# The models


@pytest.mark.parametrize("name", ["cnn", "resnet18"])
def test_the_models_scale_pixels_to_1_take_any_number_of_channels_and_look_at_no_other_image(name):
    images = torch.randint(256, (2, 3, 32, 32), dtype=torch.uint8)
    model = build_model(name, ImageSet(images, torch.zeros(2)))
    alone = torch.cat([model(images[:1]), model(images[1:])])
    torch.testing.assert_close(model(images), alone, rtol=1e-4, atol=1e-5)
    kinds = [type(layer) for layer in model.modules()]
    assert alone.shape == (2, 10) and kinds.count(Scale) == 1 and torch.nn.BatchNorm2d not in kinds
    assert torch.nn.MaxPool2d not in kinds or name == "cnn"
    assert Scale()(torch.tensor([0, 255], dtype=torch.uint8)).tolist() == [0, 1]
