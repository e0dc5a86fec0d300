"""The data sets: what is in them, how a batch is taken, and files that are there, missing or damaged."""

import ast
import codecs
import csv
import functools
import gzip
import hashlib
import http.server
import os
import pickle
import socket
import subprocess
import sys
import threading
import tracemalloc
from collections import Counter
from pathlib import Path

import numpy
import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, default_collate

from common.data import DIGITS, ImageSet, load_data
from common.model import Scale, build_model
from common.options import parse_args
from tests.processes import ROOT, SCRIPTS, context, edited, losses, run_ranks, run_script

PARTS = {"train": 6, "t10k": 3}  # images in the small Fashion-MNIST that these tests write
DEBIAN = Path("/usr/share/datasets/fashion-mnist")  # of the package dataset-fashion-mnist


def load(dataset, root="data"):
    return load_data(parse_args(["--dataset", dataset, "--data-root", str(root), "--batch-size", "1"]))


# The digits


@functools.cache
def rows():
    """digits.csv.gz, read by other means than load_data: for each row 64 pixels from 0 to 16, and the label."""
    with gzip.open(DIGITS, "rt", newline="") as file:
        return tuple(tuple(map(int, row)) for row in csv.reader(file))


def back(part):
    """The rows that an image set was made from."""
    pixels = torch.round(part.images.flatten(1) * (16 / 255)).int()
    return [(*row, label) for row, label in zip(pixels.tolist(), part.labels.tolist())]


def test_the_digits_are_1437_training_and_360_test_images():
    train_set, test_set = load("digits")
    assert (len(train_set), len(test_set)) == (1437, 360)


def test_every_fifth_row_is_test_data_and_the_others_are_training_data():
    train_set, test_set = load("digits")
    assert back(test_set) == list(rows()[::5])
    assert back(train_set) == [row for number, row in enumerate(rows()) if number % 5]


def test_every_row_is_in_exactly_one_of_the_two_sets():
    train_set, test_set = load("digits")
    assert Counter(back(train_set) + back(test_set)) == Counter(rows())


def test_a_digit_is_8_by_8_bytes_and_a_label_from_0_to_9():
    for part in load("digits"):
        assert part.images.dtype == torch.uint8 and part.images.shape == (len(part), 1, 8, 8)
        assert part.labels.dtype == torch.int64 and set(part.labels.tolist()) == set(range(10))


def test_pixels_are_scaled_so_that_white_is_255():
    images = torch.cat([part.images for part in load("digits")])
    assert images.unique().tolist() == [value * 255 // 16 for value in range(17)]
    assert images.max() == 255


# A batch


def some_images(count=10):
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (count, 1, 2, 2), dtype=torch.uint8, generator=generator)
    return ImageSet(images, torch.arange(count))


def test_the_loader_asks_once_for_all_the_images_of_a_batch():
    asked = []

    class Noted(ImageSet):
        def __getitems__(self, indices):
            asked.append(indices)
            return super().__getitems__(indices)

    data = some_images()
    list(DataLoader(Noted(data.images, data.labels), 4))
    assert asked == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_a_batch_is_taken_in_one_indexing_operation():
    operations = []

    class Note(TorchDispatchMode):
        def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
            operations.append(operation.overloadpacket.__name__)
            return operation(*args, **(kwargs or {}))

    loader = DataLoader(some_images(), 10)
    with Note():
        next(iter(loader))
    assert operations.count("index_select") == 2  # the images, and the labels
    assert not {"select", "stack", "cat"} & set(operations)


def test_a_batch_equals_its_samples_stacked_one_by_one():
    data, indices = some_images(), [7, 0, 3, 3]
    loader = DataLoader(data, batch_sampler=[indices])
    samples = default_collate([data[index] for index in indices])
    for batch, stacked in zip(next(iter(loader)), samples, strict=True):
        assert batch.dtype == stacked.dtype and torch.equal(batch, stacked)


@pytest.mark.parametrize("workers", [0, 1])
def test_the_loader_yields_images_and_labels(workers):
    data, seen = some_images(), 0
    for images, labels in DataLoader(data, 4, num_workers=workers):
        assert torch.equal(images, data.images[labels])
        seen += len(labels)
    assert seen == 10


def test_a_plain_list_of_samples_trains_as_the_image_set_does(tmp_path):
    line, lists = "load_data(args)", "[[(image, int(label)) for image, label in part] for part in load_data(args)]"
    options = ["--epochs", 1, "--batch-size", 480]
    expected = run_script(tmp_path, "single_gpu.py", *options)
    run = run_script(tmp_path, edited(tmp_path, "single_gpu.py", (line, lists)), *options)
    assert run.status == 0, run.stderr
    assert losses(run) == losses(expected) and len(losses(run)) == 1


def test_a_million_images_are_not_a_million_python_objects():
    images, labels = torch.zeros(1_000_000, 1, 2, 2, dtype=torch.uint8), torch.zeros(1_000_000, dtype=torch.int64)
    tracemalloc.start()
    next(iter(DataLoader(ImageSet(images, labels), 48)))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 100_000, f"{most} bytes, which is more than the odd object"


# What is imported


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_run_on_the_digits_never_imports_torchvision(script, tmp_path):
    last = "        seconds = time.perf_counter() - start\n"
    path = edited(tmp_path, script, (last, f"{last}        import sys; print('torchvision' in sys.modules)\n"))
    run = run_script(tmp_path, path, "--epochs", 1, "--batch-size", 480)
    assert run.status == 0 and "\nFalse\n" in run.stdout, run.stderr


def test_common_never_imports_torch_distributed_and_never_asks_for_a_rank():
    files = sorted((ROOT / "common").rglob("*.py"))
    for file in files:
        words = set()
        for node in ast.walk(ast.parse(file.read_text())):
            for field in "id", "attr", "name", "module":  # of names, attributes, imports
                words.update((getattr(node, field, None) or "").split("."))
        assert not words & {"distributed", "dist", "rank", "local_rank", "get_rank", "get_world_size"}, file
    assert len(files) >= 8


# Fashion-MNIST, in torchvision's layout


def idx(array):
    """The format of the MNIST files: 0, 0, type (8: bytes), dimensions; each size in four bytes; the data."""
    return bytes([0, 0, 8, array.ndim]) + numpy.array(array.shape, ">i4").tobytes() + array.tobytes()


def small_fashion():
    """For each of the four files its array."""
    random = numpy.random.default_rng(0)
    arrays = {}
    for part, count in PARTS.items():
        arrays[f"{part}-images-idx3-ubyte"] = random.integers(256, size=(count, 28, 28), dtype=numpy.uint8)
        arrays[f"{part}-labels-idx1-ubyte"] = random.integers(10, size=count, dtype=numpy.uint8)
    return arrays


def write_fashion(folder, suffix=""):
    """Write the four files, compressed if the suffix is .gz."""
    folder.mkdir(parents=True)
    for name, array in small_fashion().items():
        data = idx(array)
        (folder / (name + suffix)).write_bytes(gzip.compress(data) if suffix else data)


def assert_small_fashion(train_set, test_set):
    arrays = small_fashion()
    for part, data in ("train", train_set), ("t10k", test_set):
        assert data.images.shape == (PARTS[part], 1, 28, 28) and data.images.dtype == torch.uint8
        assert numpy.array_equal(data.images[:, 0].numpy(), arrays[f"{part}-images-idx3-ubyte"])
        assert data.labels.dtype == torch.int64
        assert data.labels.tolist() == arrays[f"{part}-labels-idx1-ubyte"].tolist()


@pytest.fixture
def no_network():
    """An address at which nobody listens: a port of this machine that is taken, so that nobody else gets it."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{bound.getsockname()[1]}/"


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_files_put_there_by_hand_are_used_without_a_network(tmp_path, no_network, monkeypatch, suffix):
    from torchvision.datasets import FashionMNIST

    monkeypatch.setattr(FashionMNIST, "mirrors", [no_network])
    write_fashion(tmp_path / "FashionMNIST/raw", suffix)
    assert_small_fashion(*load("fashion-mnist", tmp_path))


@pytest.mark.skipif(not DEBIAN.exists(), reason="Debian's package dataset-fashion-mnist is not installed")
def test_the_real_fashion_mnist_is_60000_and_10000_images_to_the_pixel(tmp_path):
    folder = tmp_path / "FashionMNIST/raw"
    folder.mkdir(parents=True)
    for file in DEBIAN.glob("*.gz"):
        (folder / file.name).symlink_to(file)
    for part, count, data in zip(PARTS, [60_000, 10_000], load("fashion-mnist", tmp_path), strict=True):
        pixels = gzip.decompress((DEBIAN / f"{part}-images-idx3-ubyte.gz").read_bytes())[16:]
        assert len(data) == count and data.images.shape == (count, 1, 28, 28)
        assert data.images.numpy().tobytes() == pixels


def test_a_data_root_that_cannot_be_written_to_is_enough_when_the_files_are_there(tmp_path):
    write_fashion(tmp_path / "FashionMNIST/raw")
    before = contents(tmp_path)
    tmp_path.chmod(0o555)
    process = context.Process(target=_load_as_nobody, args=(tmp_path,), daemon=True)
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert contents(tmp_path) == before


def _load_as_nobody(root):
    import torchvision  # noqa: F401  (now: where packages are installed may be closed to nobody)

    codecs.lookup("hex")  # torchvision uses it, Python loads it at first use
    os.chdir(root)
    if os.geteuid() == 0:  # may write everywhere
        os.setuid(65534)
    assert not os.access(".", os.W_OK)
    assert_small_fashion(*load("fashion-mnist", "."))


# CIFAR-10, in its own format


def python2_pickle(entries):
    """Pickle a dict whose keys are strings of Python 2, as those of the original files are."""
    data = pickle.dumps(entries, protocol=2)
    for key in entries:
        rest = len(key).to_bytes(4, "little") + key.encode()
        data = data.replace(b"X" + rest, b"T" + rest)  # BINUNICODE, BINSTRING
    return data


def test_cifar10_is_read_to_the_pixel_channel_by_channel(tmp_path, monkeypatch):
    from torchvision.datasets import CIFAR10

    random = numpy.random.default_rng(0)
    images = random.integers(256, size=(6, 2, 3072), dtype=numpy.uint8)
    labels = random.integers(10, size=(6, 2)).tolist()
    names = [f"data_batch_{number}" for number in range(1, 6)] + ["test_batch"]
    files = {name: python2_pickle({"data": images[i], "labels": labels[i]}) for i, name in enumerate(names)}
    files["batches.meta"] = python2_pickle({"label_names": list("abcdefghij")})
    (tmp_path / "cifar-10-batches-py").mkdir()
    for name, data in files.items():
        (tmp_path / "cifar-10-batches-py" / name).write_bytes(data)
    digests = [[name, hashlib.md5(data).hexdigest()] for name, data in files.items()]
    monkeypatch.setattr(CIFAR10, "train_list", digests[:5])
    monkeypatch.setattr(CIFAR10, "test_list", digests[5:6])
    monkeypatch.setattr(CIFAR10, "meta", {"filename": "batches.meta", "key": "label_names", "md5": digests[6][1]})

    train_set, test_set = load("cifar10", tmp_path)

    # A row of 3,072 bytes is the red, the green and the blue of 32 rows of 32 pixels.
    for data, expected, number in (train_set, images[:5], labels[:5]), (test_set, images[5:], labels[5:]):
        assert data.images.dtype == torch.uint8 and data.images.is_contiguous()
        assert numpy.array_equal(data.images.numpy(), expected.reshape(-1, 3, 32, 32))
        assert data.labels.dtype == torch.int64 and data.labels.tolist() == sum(number, [])


# Downloading


@pytest.fixture
def server(tmp_path):
    """Serve the small Fashion-MNIST on a free port of this machine; `requests` counts how often a file is sent."""
    write_fashion(tmp_path / "served", ".gz")

    class Handler(http.server.SimpleHTTPRequestHandler):
        def do_GET(self):
            if self.headers["Method"] != "HEAD":  # torchvision first follows redirections, with this header
                requests[self.path.lstrip("/")] += 1
            super().do_GET()

        def log_message(self, *args):
            pass

    requests = Counter()
    folder = tmp_path / "served"
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
    assert_small_fashion(*load("fashion-mnist", root))
    return rank


@pytest.mark.parametrize("root", ["", "not/there/yet"])
def test_four_processes_that_start_at_once_download_each_file_once(tmp_path, server, root):
    (tmp_path / "empty").mkdir()
    ranks = run_ranks(tmp_path, _download, tmp_path / "empty" / root, server.address, server.digests, nproc=4)
    assert ranks == [0, 1, 2, 3]
    assert server.requests == {name + ".gz": 1 for name in small_fashion()}


# What goes wrong


def contents(folder):
    """What a folder holds: for each path below it the bytes of a file, None for a folder."""
    return {path.relative_to(folder): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def run_without_network(tmp_path, script, address, root, dataset="fashion-mnist"):
    line = "from common.options import parse_args\n"
    patch = "from torchvision import datasets\n"
    patch += f"datasets.FashionMNIST.mirrors, datasets.CIFAR10.url = [{address!r}], {address!r}\n"
    script = edited(tmp_path, script, (line, line + patch))
    return run_script(tmp_path, script, "--dataset", dataset, "--data-root", root, nproc=2)


def refusal(run, folder):
    """The one line with which a run ended; it names the folder."""
    assert (run.status, run.stdout) == (2, "")
    (line,) = run.stderr.splitlines()
    assert f" into {folder}, or delete that folder to download it anew" in line
    return line


@pytest.mark.parametrize("script", SCRIPTS)
def test_without_files_and_network_one_line_names_the_folder_and_the_files(tmp_path, no_network, script):
    from torchvision.datasets import FashionMNIST

    run = run_without_network(tmp_path, script, no_network, tmp_path / "root")
    named = refusal(run, tmp_path / "root/FashionMNIST/raw").split("; put ")[1].split(" into ")[0]
    expanded = subprocess.run(["bash", "-c", f"echo {named}"], capture_output=True, text=True, timeout=60)
    assert sorted(expanded.stdout.split()) == sorted(name for name, _ in FashionMNIST.resources)


def test_without_files_and_network_cifar10_names_its_files(tmp_path, no_network):
    run = run_without_network(tmp_path, "single_gpu.py", no_network, tmp_path / "root", "cifar10")
    files = "put data_batch_1 to 5, test_batch and batches.meta into"
    assert files in refusal(run, tmp_path / "root/cifar-10-batches-py")


@pytest.mark.parametrize("dataset", ["fashion-mnist", "cifar10"])
def test_without_files_and_network_the_line_says_what_failed(tmp_path, no_network, dataset):
    run = run_without_network(tmp_path, "single_gpu.py", no_network, tmp_path / "root", dataset)
    assert f"{dataset} cannot be read or downloaded" in run.stderr and "Connection refused" in run.stderr


@pytest.mark.parametrize("dataset", ["fashion-mnist", "cifar10"])
@pytest.mark.parametrize("exists", [True, False])
def test_without_files_and_network_the_data_root_is_left_as_it_was(tmp_path, no_network, dataset, exists):
    root = tmp_path / "root"
    if exists:
        root.mkdir()
    run_without_network(tmp_path, "single_gpu.py", no_network, root, dataset)
    assert root.exists() == exists and contents(root) == {}


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_damaged_file_is_named_in_one_line_and_left_as_it_was(tmp_path, no_network, suffix):
    root = tmp_path / "root"
    write_fashion(root / "FashionMNIST/raw", suffix)
    damaged = root / f"FashionMNIST/raw/train-images-idx3-ubyte{suffix}"
    damaged.write_bytes(damaged.read_bytes()[:500])
    before = contents(root)
    refusal(run_without_network(tmp_path, "single_gpu.py", no_network, root), root / "FashionMNIST/raw")
    assert contents(root) == before


def test_a_whole_archive_in_place_of_a_damaged_one_is_enough(tmp_path, no_network):
    root = tmp_path / "root"
    write_fashion(root / "FashionMNIST/raw", ".gz")
    archive = root / "FashionMNIST/raw/train-images-idx3-ubyte.gz"
    whole = archive.read_bytes()
    archive.write_bytes(whole[:500])
    refusal(run_without_network(tmp_path, "single_gpu.py", no_network, root), root / "FashionMNIST/raw")
    archive.write_bytes(whole)
    assert_small_fashion(*load("fashion-mnist", root))


def test_a_data_root_that_is_a_file_is_refused_and_left_as_it_was(tmp_path):
    (tmp_path / "data").write_text("mine")
    result = run_script(tmp_path, "single_gpu.py", "--dataset", "cifar10", "--data-root", tmp_path / "data")
    assert result.status == 2 and result.stderr.startswith(f"--data-root {tmp_path / 'data'} is not a folder")
    assert len(result.stderr.splitlines()) == 1 and (tmp_path / "data").read_text() == "mine"


def test_a_data_root_in_a_folder_of_somebody_else_is_refused_in_one_line(tmp_path):
    (tmp_path / "theirs").mkdir(mode=0)
    with open(tmp_path / "stderr", "w") as stderr:
        process = context.Process(target=_fail_as_nobody, args=(tmp_path / "theirs/data", stderr.name), daemon=True)
        process.start()
        process.join(60)
    line = (tmp_path / "stderr").read_text()
    assert process.exitcode == 2 and line.count("\n") == 1
    assert line.startswith("fashion-mnist cannot be read or downloaded (PermissionError")


def _fail_as_nobody(root, stderr):
    import torchvision  # noqa: F401  (now, as below)

    sys.stderr = open(stderr, "w")
    if os.geteuid() == 0:
        os.setuid(65534)
    load("fashion-mnist", root)


# What goes wrong in torchvision's class


def failing(monkeypatch, tmp_path, leave=False):
    """The timeouts that sockets have in a FashionMNIST which then raises an unusual error, that load() must refuse."""
    from torchvision.datasets import FashionMNIST

    timeouts = []

    def fail(self, root, **options):
        timeouts.append(socket.getdefaulttimeout())
        if leave:
            raw = Path(root) / "FashionMNIST/raw"
            raw.mkdir(parents=True, exist_ok=True)
            (raw / "half").write_bytes(b"half")
        raise KeyError(3)

    monkeypatch.setattr(FashionMNIST, "__init__", fail)
    with pytest.raises(SystemExit) as refused:
        load("fashion-mnist", tmp_path / "data")
    assert refused.value.code == 2
    return timeouts


def test_a_download_has_sixty_seconds_for_each_answer_and_other_sockets_keep_theirs(monkeypatch, tmp_path, capsys):
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(7)
    try:
        assert failing(monkeypatch, tmp_path) == [60]
        assert socket.getdefaulttimeout() == 7
    finally:
        socket.setdefaulttimeout(before)
    assert "cannot be read or downloaded (KeyError: 3)" in capsys.readouterr().err


def test_half_a_download_is_one_line_too(monkeypatch, tmp_path):
    failing(monkeypatch, tmp_path, leave=True)
    assert (tmp_path / "data/FashionMNIST/raw/half").exists()


def test_files_that_were_unpacked_by_hand_count_more_than_the_archive_beside_them(tmp_path):
    write_fashion(tmp_path / "FashionMNIST/raw")
    (tmp_path / "FashionMNIST/raw/train-images-idx3-ubyte.gz").write_bytes(b"junk")
    assert_small_fashion(*load("fashion-mnist", tmp_path))


# The models


def test_the_models_take_pixels_from_0_to_255_of_any_channels_and_look_at_no_other_image():
    assert Scale()(torch.tensor([255], dtype=torch.uint8)).item() == 1
    images = torch.randint(256, (2, 3, 32, 32), dtype=torch.uint8)
    for name in "cnn", "resnet18":
        args = parse_args(["--model", name])
        model = build_model(args, ImageSet(images, torch.zeros(2)), classes=7)
        assert isinstance((model[0] if name == "cnn" else model.conv1[0]), Scale)
        alone = torch.cat([model(images[:1]), model(images[1:])])
        assert alone.shape == (2, 7)
        torch.testing.assert_close(model(images), alone, rtol=1e-4, atol=1e-5)
        assert not [layer for layer in model.modules() if isinstance(layer, torch.nn.BatchNorm2d)]
    assert isinstance(model.maxpool, torch.nn.Identity)
