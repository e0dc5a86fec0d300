"""--checkpoint: what is in the file, what is refused, and that nothing is lost, whatever happens while it is saved."""

import gc
import io
import os
import random
import resource
import signal
import tempfile
import threading
from pathlib import Path

import pytest
import torch
from filelock import FileLock, Timeout
from torch.optim.lr_scheduler import CosineAnnealingLR, CyclicLR, MultiStepLR, OneCycleLR

from common.checkpoint import load_checkpoint, save_checkpoint
from common.data import load_data
from common.model import build_model
from tests.processes import SCRIPTS, edited, in_process, run_script, run_scripts

every_script = pytest.mark.parametrize("script", SCRIPTS)
FAST = ["--batch-size", 240]
OPTIONS = {"dataset": "digits", "model": "cnn", "batch_size": 48, "lr": 0.02, "seed": 0, "epochs": 10}
DIGITS = load_data("digits", None)[0]
LOAD = "load_checkpoint(args.checkpoint, vars(args), model=model, optimizer=optimizer)"
FITS_NOT = "does not fit this model and optimizer ("


def objects():
    """What the scripts name in load_checkpoint and save_checkpoint, freshly made."""
    torch.manual_seed(0)
    model = build_model("cnn", DIGITS)
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), 0.02, momentum=0.9)}


def save(path, epoch=0, **others):
    save_checkpoint(path, OPTIONS, epoch, **{**objects(), **others})
    return path


def load(path, **others):
    return load_checkpoint(path, OPTIONS, **{**objects(), **others})


def refusal(capsys, call, *args, **others):
    with pytest.raises(SystemExit) as refused:
        call(*args, **others)
    code, text = refused.value.code, capsys.readouterr().err
    del refused
    gc.collect()  # what the traceback keeps, the model and with it the lock
    assert code == 2 and text.count("\n") == 1
    return text


def trained(folder, script="single_gpu.py", epochs=2, nproc=2, options=FAST):
    run = run_script(folder, script, "--epochs", epochs, "--checkpoint", folder / "model.pt", *options, nproc=nproc)
    assert run.status == 0, run.stderr
    return run


# What is in it


@every_script
def test_the_file_holds_plain_weights_the_optimizer_the_epoch_and_the_settings(script, tmp_path):
    trained(tmp_path, script)
    state = torch.load(tmp_path / "model.pt", weights_only=True)
    assert set(state) == {"model", "optimizer", "epoch", "settings"} and state["epoch"] == 2
    assert state["settings"] == {"dataset": "digits", "model": "cnn", "batch_size": 240, "lr": 0.02, "seed": 0}
    assert list(state["model"]) == list(objects()["model"].state_dict())
    assert all(buffers["momentum_buffer"].abs().sum() > 0 for buffers in state["optimizer"]["state"].values())
    before = (tmp_path / "model.pt").stat()
    for epochs in 2, 1:  # a finished run says so, and changes nothing
        again = trained(tmp_path, script, epochs)
        assert f"after epoch 2 of {epochs} (--epochs)" in again.stdout and again.losses == []
    assert (tmp_path / "model.pt").stat().st_mtime_ns == before.st_mtime_ns
    assert {path.name for path in tmp_path.iterdir() if path.is_file()} == {"model.pt"}


def test_the_ranks_need_no_file_but_that_of_rank_0(tmp_path):
    """As on machines that do not share the folder."""
    whole = trained(tmp_path / "whole", "ddp_torchrun.py")
    trained(tmp_path, "ddp_torchrun.py", epochs=1)
    elsewhere = LOAD.replace("args.checkpoint", "args.checkpoint if rank == 0 else args.checkpoint / 'not/here'")
    resumed = trained(tmp_path, edited(tmp_path, "ddp_torchrun.py", (LOAD, elsewhere)))
    assert resumed.weights[1] == whole.weights[1][1:]


# Whatever has a state_dict and is named in both calls


@pytest.mark.parametrize("schedule, how", [(MultiStepLR, [[1, 2]]), (OneCycleLR, [0.1, 9]), (CyclicLR, [0.01, 0.1])])
def test_a_scheduler_is_plain_data_and_its_rate_comes_from_the_file(schedule, how, tmp_path):
    rates = []
    for call, steps in ((save_checkpoint, 5), (load_checkpoint, 0)):
        named = objects()
        named["scheduler"] = schedule(named["optimizer"], *how)
        for _ in range(steps):
            named["optimizer"].step(), named["scheduler"].step()
        call(tmp_path / "model.pt", OPTIONS, *[0][: call is save_checkpoint], **named)
        rates.append([named["optimizer"].param_groups[0][key] for key in ("lr", "momentum")])
    assert rates[0] == rates[1] != [0.02, 0.9]


def test_a_scheduler_that_is_not_named_and_what_nothing_loads_are_errors(tmp_path, capsys):
    named = objects()
    scheduler = CosineAnnealingLR(named["optimizer"], 4)
    with pytest.raises(ValueError, match="need the scheduler"):
        load_checkpoint(tmp_path / "model.pt", OPTIONS, **named)
    with pytest.raises(ValueError, match="need the scheduler"):
        save_checkpoint(tmp_path / "model.pt", OPTIONS, 0, **named)
    save_checkpoint(tmp_path / "model.pt", OPTIONS, 0, **named, scheduler=scheduler)
    assert "nothing here loads scheduler" in refusal(capsys, load, tmp_path / "model.pt")
    save(tmp_path / "model.pt")
    assert "(KeyError: 'average')" in refusal(capsys, load, tmp_path / "model.pt", average=named["model"])


def test_another_optimizer_is_refused_but_not_another_rate(tmp_path, capsys):
    save(tmp_path / "model.pt")
    for other in ({"momentum": 0.5}, {"momentum": 0.9, "weight_decay": 0.1}, {"momentum": 0.9, "nesterov": True}, None):
        named = objects()
        parameters = named["model"].parameters()
        named["optimizer"] = torch.optim.SGD(parameters, 0.02, **other) if other else torch.optim.Adam(parameters, 0.02)
        assert f"{FITS_NOT}ValueError: another optimizer)" in refusal(capsys, load, tmp_path / "model.pt", **named)
    named = objects()
    named["optimizer"].param_groups[0]["lr"] = 0.5  # by hand, in a loop
    save(tmp_path / "model.pt", **named)
    named = objects()
    assert load(tmp_path / "model.pt", **named) == 1 and named["optimizer"].param_groups[0]["lr"] == 0.5


# Files that are not right


class Trap:
    """Who loads it as a pickle makes a folder."""

    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (self.folder,)


WRONG = {
    "empty": lambda path, state: path.write_bytes(b""),
    "text": lambda path, state: path.write_text("hello\nworld\n"),
    "weights only": lambda path, state: torch.save(state["model"], path),
    "a list": lambda path, state: torch.save([1, 2, 3], path),
    "a program": lambda path, state: torch.save(Trap(f"{path}.run"), path),
    "a weight less": lambda path, state: (state["model"].popitem(), torch.save(state, path)),
    "other names": lambda path, state: torch.save({**state, "model": {"x" * 999: torch.zeros(1)}}, path),
    **{
        f"no {name}": lambda path, state, name=name: (state.pop(name), torch.save(state, path))
        for name in ("model", "optimizer", "epoch", "settings")
    },
    **{
        f"epoch {epoch!r}": lambda path, state, epoch=epoch: torch.save({**state, "epoch": epoch}, path)
        for epoch in (-1, 0, "2", 2.5, True)
    },
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_file_that_is_no_checkpoint_of_this_model_is_refused_and_left_as_it_is(kind, tmp_path, capsys):
    path = save(tmp_path / "model.pt")
    WRONG[kind](path, torch.load(path, weights_only=True))
    before, line = path.read_bytes(), refusal(capsys, load, path)
    assert line.removeprefix(f"{path} ").startswith(("is damaged or not a checkpoint of these scripts (", FITS_NOT))
    assert line.endswith("; move it away, or use another --checkpoint\n") and len(line) < 400
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    "name, made", [("batch_size", 96), ("lr", 0.5), ("seed", 1), ("model", "resnet18"), ("dataset", "cifar10")]
)
def test_a_checkpoint_made_with_another_setting_is_refused(name, made, tmp_path, capsys):
    path, given = tmp_path / "model.pt", f"--{name.replace('_', '-')} {made}"
    save_checkpoint(path, {**OPTIONS, name: made}, 0, **objects())
    line = refusal(capsys, load, path)
    assert line == f"{path} was made with {given}, not {OPTIONS[name]}; use that, or another --checkpoint\n"


def test_no_truncated_file_and_no_flipped_bit_goes_unnoticed(tmp_path):
    """200 of each: a refusal, or the very weights that were saved. torch.load alone takes flipped bits for weights."""
    path = save(tmp_path / "model.pt")
    whole, saved = path.read_bytes(), objects()["model"].state_dict()
    chance, damaged, refused = random.Random(0), [], 0
    for _ in range(200):
        damaged.append(whole[: chance.randrange(len(whole))])
        place, bit = chance.randrange(len(whole)), chance.randrange(8)
        damaged.append(whole[:place] + bytes([whole[place] ^ 1 << bit]) + whole[place + 1 :])
    for data in damaged:
        path.write_bytes(data)
        named = objects()
        try:
            assert load(path, **named) == 1
            assert all(torch.equal(saved[name], weight) for name, weight in named["model"].state_dict().items())
        except SystemExit:
            refused += 1
    assert len(damaged) == 400 and refused > 350
    path.write_bytes(whole[: len(whole) // 2] + bytes([whole[len(whole) // 2] ^ 64]) + whole[len(whole) // 2 + 1 :])
    torch.load(path, weights_only=True)


# Paths that are not right


@pytest.mark.parametrize(
    "path, fact",
    [
        (".", "is a folder, a device or a pipe; name a file"),
        ("pipe", "is a folder, a device or a pipe; name a file"),
        ("/dev/full", "is a folder, a device or a pipe; name a file"),
        ("not there/model.pt", "has no folder; make it first, or name another"),
        ("$HOME/model.pt", "has no folder; make it first, or name another"),
        ("x" * 250, "File name too long"),
        ("taken", "cannot be used"),
        ("closed/model.pt", "cannot be used"),
        ("open/unreadable.pt", "cannot be used"),
    ],
)
def test_a_path_that_cannot_be_used_is_one_line_and_leaves_nothing(path, fact):
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        os.mkfifo(folder / "pipe")
        for name, mode in (".taken.lock", 0o777), ("closed", 0o555), ("open", 0o777), ("", 0o777):
            (folder / name).mkdir(exist_ok=True)
            os.chmod(folder / name, mode)
        (folder / "open/unreadable.pt").touch(0)
        before = sorted(folder.rglob("*"))
        status, line = in_process(load, folder / "stderr", Path(path), nobody=True)
        assert status == 2 and fact in line and line.count("\n") == 1 and "mkdir" not in line
        assert sorted(folder.rglob("*")) == sorted([*before, folder / "stderr"])


def test_a_symbolic_link_stays_and_what_it_points_to_is_written(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/link.pt").symlink_to("real.pt")
    (tmp_path / "model.pt").symlink_to("folder/link.pt")
    save(tmp_path / "model.pt")
    assert load(tmp_path / "model.pt") == 1
    assert (tmp_path / "model.pt").is_symlink() and (tmp_path / "folder/link.pt").is_symlink()
    assert torch.load(tmp_path / "folder/real.pt", weights_only=True)["epoch"] == 1


# While it is written

DEADLY = """
import os, signal
call, calls = os.NAME, []
def deadly(*args):
    calls.append(1)
    if len(calls) == 2 and "SIDE" == "before":
        os.kill(os.getpid(), signal.NUMBER)
    call(*args)
    if len(calls) == 2:
        os.kill(os.getpid(), signal.NUMBER)
os.NAME = deadly
"""


@pytest.mark.parametrize(
    "name, side, number",
    [(name, side, signal.SIGKILL) for name in ("fsync", "replace") for side in ("before", "after")]
    + [("replace", "before", number) for number in (signal.SIGTERM, signal.SIGINT)],
)
def test_a_process_that_ends_while_it_saves_leaves_a_whole_checkpoint(name, side, number, tmp_path):
    """In the second of three saves; the run then ends as if nothing had happened, and nothing is left."""
    deadly = DEADLY.replace("NUMBER", number.name).replace("NAME", name).replace("SIDE", side)
    script = edited(tmp_path, "single_gpu.py", ("import time\n", f"import time\n{deadly}"))
    run = run_script(tmp_path, script, "--epochs", 3, "--checkpoint", tmp_path / "model.pt", *FAST)
    assert run.status == (1 if number == signal.SIGINT else -number)
    saved = 2 if (name, side) == ("replace", "after") else 1
    assert torch.load(tmp_path / "model.pt", weights_only=True)["epoch"] == saved
    assert len(trained(tmp_path, epochs=3).losses) == 3 - saved
    assert {path.name for path in tmp_path.iterdir() if path.is_file()} == {"model.pt", "single_gpu.py"}


def test_the_new_file_is_whole_on_the_disk_before_it_takes_the_place_of_the_old_one(tmp_path, monkeypatch):
    """Or a power cut could leave a checkpoint of which only the name was written."""
    calls, fsync, replace = [], os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda number: (calls.append(os.fstat(number).st_size), fsync(number)))
    monkeypatch.setattr(os, "replace", lambda old, new: (calls.append(os.stat(old).st_size), replace(old, new)))
    assert calls == [] and [save(tmp_path / "model.pt").stat().st_size] * 2 == calls


def save_with_little_room(path):
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))  # bytes, as on a disk that is nearly full
    save(path, epoch=1)


def test_a_full_disk_is_one_line_and_the_last_checkpoint_stays(tmp_path, monkeypatch, capsys):
    path = save(tmp_path / "model.pt")
    before = path.read_bytes()
    line = f"epoch 2 cannot be saved in {path} ([Errno 27] File too large); it is as it was before\n"
    assert in_process(save_with_little_room, tmp_path / "stderr", path) == (2, line)
    assert "No such file or directory" in refusal(capsys, save, tmp_path / "gone/model.pt")
    monkeypatch.setattr("builtins.open", lambda *_: io.open("/dev/full", "wb"))
    assert "[Errno 28] No space left on device" in refusal(capsys, save, path)
    assert path.read_bytes() == before and {file.name for file in tmp_path.iterdir()} == {"model.pt", "stderr"}


@pytest.mark.parametrize(
    "make", [lambda path: path.write_bytes(b"PK"), os.mkfifo, lambda path: path.symlink_to("elsewhere")]
)
def test_whatever_bears_the_name_of_the_new_file_is_replaced_and_not_written_into(make, tmp_path):
    """As a killed run left it; a pipe would be waited for, and what a link points to be overwritten."""
    make(tmp_path / ".model.pt.tmp")
    save(tmp_path / "model.pt")
    assert [path.name for path in tmp_path.iterdir()] == ["model.pt"] and load(tmp_path / "model.pt") == 1


@every_script
def test_a_loss_that_is_not_finite_leaves_the_last_good_checkpoint(script, tmp_path):
    line = "        check_loss("
    fault = (line, f"        totals[0] += 0 if epoch < 1 else float('-inf')\n{line}")
    path = edited(tmp_path, script, fault)
    run = run_script(tmp_path, path, "--epochs", 3, "--checkpoint", tmp_path / "model.pt", *FAST, nproc=2)
    assert run.status == 2 and run.stderr == "the loss of epoch 2 is -inf; try an --lr below 0.02\n"
    assert torch.load(tmp_path / "model.pt", weights_only=True)["epoch"] == 1


# Two runs


def test_while_a_run_trains_others_are_refused_in_one_line(tmp_path):
    """It holds the lock from before its first step, so also where the others start in the same second."""
    path, named = tmp_path / "model.pt", objects()
    assert load_checkpoint(path, OPTIONS, **named) == 0
    for other in run_scripts([(tmp_path, script, "--checkpoint", path) for script in SCRIPTS], nproc=2):
        assert (other.status, other.stderr.count("\n")) == (2, 1)
        assert other.stderr.startswith(f"another run is writing {path}; wait for it")


def test_a_run_that_is_about_to_end_is_waited_for(tmp_path):
    path = save(tmp_path / "model.pt")
    ending = FileLock(tmp_path / ".model.pt.lock", thread_local=False)
    ending.acquire()
    end = threading.Timer(0.5, ending.release)
    end.start()
    assert load(path) == 1
    end.join()


def test_the_file_of_the_lock_goes_while_nobody_else_can_hold_it_and_it_is_no_error_if_it_stays(tmp_path, monkeypatch):
    release, there = FileLock.release, []
    monkeypatch.setattr(FileLock, "release", lambda lock: (there.append(Path(lock.lock_file).exists()), release(lock)))
    load(tmp_path / "model.pt")
    monkeypatch.setattr(os, "unlink", lambda *_: os.open("/", os.O_WRONLY))  # not allowed
    load(tmp_path / "model.pt")
    assert there == [False, True]


def test_the_lock_is_held_as_long_as_the_model_exists_but_not_against_the_same_process(tmp_path):
    """In a notebook the traceback of an interrupted run keeps its model."""
    path, named, other = tmp_path / "model.pt", objects(), FileLock(tmp_path / ".model.pt.lock", timeout=0)
    for _ in range(2):
        assert load_checkpoint(path, OPTIONS, **named) == 0
    with pytest.raises(Timeout):
        other.acquire()
    del named
    other.acquire()
