"""--checkpoint: what is in the file, what is refused, and that nothing is lost, whatever happens while it is written."""

import functools
import io
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import threading
from pathlib import Path

import pytest
import torch
from filelock import FileLock

from common.checkpoint import load_checkpoint, save_checkpoint
from common.data import load_data
from common.model import build_model
from common.options import parse_args
from common.path import lock, unlock
from tests.processes import SCRIPTS, context, edited, losses, run_script, run_scripts, weights

every_script = pytest.mark.parametrize("script", SCRIPTS)
FAST = ["--batch-size", 240]


@functools.cache
def digits():
    return load_data(parse_args([]))[0]


def parts(path, *options):
    """What the scripts give to load_checkpoint and save_checkpoint."""
    args = parse_args(["--checkpoint", str(path), *map(str, options)])
    torch.manual_seed(args.seed)
    model = build_model(args, digits())
    return args, model, torch.optim.SGD(model.parameters(), args.lr, momentum=0.9)


def trained(tmp_path, script="single_gpu.py", epochs=2):
    result = run_script(tmp_path, script, "--epochs", epochs, "--checkpoint", tmp_path / "model.pt", *FAST, nproc=2)
    assert result.status == 0, result.stderr
    return result


@pytest.fixture(scope="module", params=SCRIPTS)
def finished(request, tmp_path_factory):
    """A script, and the folder where it has trained two epochs."""
    folder = tmp_path_factory.mktemp("finished")
    trained(folder, request.param)
    return request.param, folder


def test_the_file_holds_plain_weights_the_optimizer_the_epoch_and_the_settings(finished, tmp_path):
    state = torch.load(finished[1] / "model.pt", weights_only=True)
    assert set(state) == {"model", "optimizer", "epoch", "settings"}
    assert state["epoch"] == 2
    assert state["settings"] == {"dataset": "digits", "model": "cnn", "batch_size": 240, "lr": 0.02, "seed": 0}
    args, model, optimizer = parts(tmp_path / "other.pt")
    assert list(state["model"]) == list(model.state_dict())
    assert all(buffers["momentum_buffer"].abs().sum() > 0 for buffers in state["optimizer"]["state"].values())


def test_a_finished_run_says_so_and_changes_nothing(finished):
    script, folder = finished
    before = (folder / "model.pt").stat()
    for epochs in 2, 1:
        again = trained(folder, script, epochs)
        assert "has 2 epochs already" in again.stdout and losses(again) == []
    after = (folder / "model.pt").stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


@every_script
def test_only_one_process_writes(script, tmp_path):
    count = "        save_checkpoint(args, model, optimizer, epoch)\n"
    if script == "single_gpu.py":
        edit = (count, count + '        print("written by", 0, flush=True)\n')
    else:
        edit = ("    " + count, "    " + count + '            print("written by", rank, flush=True)\n')
    result = trained(tmp_path, edited(tmp_path, script, edit))
    assert result.stdout.count("written by 0") == result.stdout.count("written by") == 2


def test_the_learning_rate_is_the_one_that_was_given_and_not_the_last_one_of_a_schedule(tmp_path):
    args, model, optimizer = parts(tmp_path / "model.pt")
    optimizer.param_groups[0]["lr"] = 0.5
    save_checkpoint(args, model, optimizer, epoch=0)
    args, model, optimizer = parts(tmp_path / "model.pt")
    assert load_checkpoint(args, model, optimizer) == 1
    assert optimizer.param_groups[0]["lr"] == args.lr == 0.02


def test_another_optimizer_is_refused(tmp_path, capsys):
    save_checkpoint(*parts(tmp_path / "model.pt"), epoch=0)
    args, model, _ = parts(tmp_path / "model.pt")
    for optimizer in (
        torch.optim.SGD(model.parameters(), args.lr, momentum=0.5),
        torch.optim.Adam(model.parameters(), args.lr),
    ):
        with pytest.raises(SystemExit):
            load_checkpoint(args, model, optimizer)
        assert "does not fit this model and optimizer (ValueError: another optimizer)" in capsys.readouterr().err


def test_without_the_state_of_the_optimizer_a_resumed_run_ends_elsewhere(tmp_path):
    """The momentum counts; that a resumed run ends with equal bits is proved in test_exactness.py."""
    whole = trained(tmp_path, epochs=2)
    (tmp_path / "model.pt").unlink()
    trained(tmp_path, epochs=1)
    state = torch.load(tmp_path / "model.pt", weights_only=True)
    state["optimizer"]["state"] = {}
    torch.save(state, tmp_path / "model.pt")
    assert weights(trained(tmp_path, epochs=2))[0][-1] != weights(whole)[0][-1]


# Files that are not right


def outcome(path):
    """Load a file as the scripts do: the epoch and the weights, or the line of the refusal."""
    args, model, optimizer = parts(path)
    try:
        return load_checkpoint(args, model, optimizer), model.state_dict()
    except SystemExit as refused:
        assert refused.code == 2
        return None


def test_no_truncated_file_and_no_flipped_bit_goes_unnoticed(tmp_path):
    """200 of each: a refusal in one line, or the very weights that were saved; the file stays as it is."""
    path = tmp_path / "model.pt"
    save_checkpoint(*parts(path), epoch=0)
    whole, weights_saved = path.read_bytes(), outcome(path)[1]
    chance = random.Random(0)
    damaged = [whole[: chance.randrange(len(whole))] for _ in range(200)]
    for _ in range(200):
        place, bit = chance.randrange(len(whole)), chance.randrange(8)
        damaged.append(whole[:place] + bytes([whole[place] ^ 1 << bit]) + whole[place + 1 :])
    refused = 0
    for data in damaged:
        path.write_bytes(data)
        result = outcome(path)
        assert path.read_bytes() == data
        if result is None:
            refused += 1
        else:
            assert result[0] == 1
            assert all(torch.equal(result[1][name], weight) for name, weight in weights_saved.items())
    assert len(damaged) == 400 and refused > 350


def test_torch_load_alone_takes_flipped_bits_for_weights(tmp_path):
    """Why the checksums are compared: torch.load does not."""
    path = tmp_path / "model.pt"
    save_checkpoint(*parts(path), epoch=0)
    whole = path.read_bytes()
    place = len(whole) // 2
    path.write_bytes(whole[:place] + bytes([whole[place] ^ 64]) + whole[place + 1 :])
    torch.load(path, weights_only=True)
    assert outcome(path) is None


def test_a_model_of_another_shape_is_refused_though_the_settings_are_the_same(tmp_path, capsys):
    path = tmp_path / "model.pt"
    save_checkpoint(*parts(path), epoch=0)
    state = torch.load(path, weights_only=True)
    for name in "model", "optimizer", "epoch":
        torch.save({key: value for key, value in state.items() if key != name}, path)
        with pytest.raises(SystemExit):
            load_checkpoint(*parts(path))
        assert "does not fit this model and optimizer (KeyError" in capsys.readouterr().err
    for epoch in -1, 0, "2", 2.5, True:
        torch.save(state | {"epoch": epoch}, path)
        with pytest.raises(SystemExit):
            load_checkpoint(*parts(path))
    capsys.readouterr()
    torch.save(state | {"model": dict(list(state["model"].items())[1:])}, path)
    with pytest.raises(SystemExit):
        load_checkpoint(*parts(path))
    assert "does not fit this model and optimizer (RuntimeError" in capsys.readouterr().err
    torch.save(state | {"model": {f"{key}.and.a.long.name": value for key, value in state["model"].items()}}, path)
    with pytest.raises(SystemExit):
        load_checkpoint(*parts(path))
    [reason] = re.findall(r"\((.+)\); use another one\n", capsys.readouterr().err)
    assert 150 < len(reason) <= 200 and reason.endswith(" …")


def test_a_path_that_cannot_be_written_is_refused_before_the_first_step(tmp_path, capsys):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / ".taken.lock").mkdir()
    for path, fact in (
        (tmp_path, "is a folder"),
        (tmp_path / "not there/model.pt", f"mkdir -p '{tmp_path}/not there'"),
        (tmp_path / "pipe", "is a device or a pipe"),
        ("/dev/full", "is a device or a pipe"),
        (tmp_path / ("x" * 250), "File name too long"),
        (tmp_path / "taken", "cannot be locked"),
    ):
        with pytest.raises(SystemExit) as refused:
            parse_args(["--checkpoint", str(path)])
        assert refused.value.code == 2 and fact in capsys.readouterr().err
    with tempfile.TemporaryDirectory() as locked, tempfile.TemporaryDirectory() as open_to_all:
        os.chmod(locked, 0o555), os.chmod(open_to_all, 0o777)
        (tmp_path / "unreadable.pt").touch()
        os.chmod(tmp_path / "unreadable.pt", 0)
        shutil.move(tmp_path / "unreadable.pt", open_to_all)
        for path in f"{locked}/model.pt", tmp_path / "model.pt", f"{open_to_all}/unreadable.pt":
            process = context.Process(target=parse_as_nobody, args=(str(path), tmp_path / "said"))
            process.start()
            process.join(60)
            assert process.exitcode == 2 and (tmp_path / "said").read_text().count("\n") == 1


def parse_as_nobody(path, stderr):
    sys.stderr = open(stderr, "w")
    if os.geteuid() == 0:  # who may write everywhere
        os.setuid(65534)
    parse_args(["--checkpoint", path])


# While it is written


@pytest.fixture(scope="module")
def untouched(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("untouched"), epochs=3)


@pytest.mark.parametrize("moment", ["os.fsync(file.fileno())", "os.replace(temporary, args.checkpoint)"])
@pytest.mark.parametrize("side", ["before", "after"])
def test_a_process_that_is_killed_while_it_saves_leaves_a_whole_checkpoint(moment, side, tmp_path, untouched):
    """Killed in the second save, beside a call that writes; the run then ends as if nothing had happened."""
    script = edited(tmp_path, "single_gpu.py", ("import time\n", f"import time\n{DEADLY.format(moment, side)}"))
    result = run_script(tmp_path, script, "--epochs", 3, "--checkpoint", tmp_path / "model.pt", *FAST)
    assert result.status == -9
    saved = 2 if (moment, side) == ("os.replace(temporary, args.checkpoint)", "after") else 1
    assert torch.load(tmp_path / "model.pt", weights_only=True)["epoch"] == saved
    rest = trained(tmp_path, epochs=3)
    assert len(losses(rest)) == 3 - saved
    assert weights(rest)[0][-1] == weights(untouched)[0][-1]
    left = {path.name for path in tmp_path.iterdir() if path.is_file()} - {"single_gpu.py"}
    assert left == {"model.pt"}, "and nothing piles up"


DEADLY = """
import os, signal
def deadly(moment, side):
    name = moment.split("(")[0].removeprefix("os.")
    call, calls = getattr(os, name), []
    def counted(*args):
        calls.append(1)
        if len(calls) == 2 and side == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        call(*args)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
    setattr(os, name, counted)
deadly("{}", "{}")
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_process_that_a_signal_ends_while_it_saves_leaves_a_whole_checkpoint(number, tmp_path):
    """SIGTERM ends it as SIGKILL does; SIGINT raises KeyboardInterrupt, which lets it clean up."""
    deadly = DEADLY.format("os.replace(temporary, args.checkpoint)", "before").replace("SIGKILL", number.name)
    script = edited(tmp_path, "single_gpu.py", ("import time\n", f"import time\n{deadly}"))
    result = run_script(tmp_path, script, "--epochs", 3, "--checkpoint", tmp_path / "model.pt", *FAST)
    assert result.status == (-15 if number == signal.SIGTERM else 1)
    assert torch.load(tmp_path / "model.pt", weights_only=True)["epoch"] == 1
    assert (tmp_path / ".model.pt.tmp").exists() == (number == signal.SIGTERM)
    assert len(losses(trained(tmp_path))) == 1


def test_the_new_file_is_whole_on_the_disk_before_it_takes_the_place_of_the_old_one(tmp_path, monkeypatch):
    """Or a power cut could leave a checkpoint of which only the name was written."""
    path, calls, fsync, replace = tmp_path / "model.pt", [], os.fsync, os.replace

    def noted_fsync(number):
        calls.append(("fsync", os.fstat(number).st_size))
        fsync(number)

    def noted_replace(source, target):
        calls.append(("replace", os.stat(source).st_size))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "replace", noted_replace)
    save_checkpoint(*parts(path), epoch=0)
    assert calls == [("fsync", path.stat().st_size), ("replace", path.stat().st_size)]


def save_with_little_room(path, stderr):
    sys.stderr = open(stderr, "w")
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))  # bytes, as on a disk that is nearly full
    save_checkpoint(*parts(path), epoch=1)


def test_a_full_disk_is_one_line_and_the_last_checkpoint_stays(tmp_path):
    path = tmp_path / "model.pt"
    save_checkpoint(*parts(path), epoch=0)
    before = path.read_bytes()
    with open(tmp_path / "stderr", "w") as stderr:
        process = context.Process(target=save_with_little_room, args=(path, stderr.name))
        process.start()
        process.join(60)
    assert process.exitcode == 2
    assert path.read_bytes() == before and {file.name for file in tmp_path.iterdir()} == {"model.pt", "stderr"}
    line = f"epoch 2 cannot be saved in {path} ([Errno 27] File too large); it is as it was before\n"
    assert (tmp_path / "stderr").read_text() == line


def test_a_disk_without_any_room_is_named_too(tmp_path, monkeypatch, capsys):
    path = tmp_path / "model.pt"
    save_checkpoint(*parts(path), epoch=0)
    before = path.read_bytes()
    monkeypatch.setattr("builtins.open", lambda *_: io.open("/dev/full", "wb"))
    with pytest.raises(SystemExit):
        save_checkpoint(*parts(path), epoch=1)
    assert f"cannot be saved in {path} ([Errno 28] No space left on device)" in capsys.readouterr().err
    assert path.read_bytes() == before


HALF_A_FILE, A_PIPE, A_LINK = lambda path: path.write_bytes(b"PK"), os.mkfifo, lambda path: path.symlink_to("elsewhere")


@pytest.mark.parametrize("make", [HALF_A_FILE, A_PIPE, A_LINK])
def test_whatever_bears_the_name_of_the_new_file_is_replaced_and_not_written_into(make, tmp_path):
    """As a killed run left it; a pipe would be waited for, and what a link points to be overwritten."""
    make(tmp_path / ".model.pt.tmp")
    save_checkpoint(*parts(tmp_path / "model.pt"), epoch=0)
    assert torch.load(tmp_path / "model.pt", weights_only=True)["epoch"] == 1
    assert [path.name for path in tmp_path.iterdir() if path.is_file() and not path.is_symlink()] == ["model.pt"]


def test_a_folder_that_is_gone_when_the_epoch_is_saved_is_one_line(tmp_path, capsys):
    (tmp_path / "folder").mkdir()
    arguments = parts(tmp_path / "folder/model.pt")
    (tmp_path / "folder").rmdir()
    with pytest.raises(SystemExit):
        save_checkpoint(*arguments, epoch=0)
    assert "No such file or directory" in capsys.readouterr().err


def test_of_two_runs_with_one_checkpoint_the_second_is_refused(tmp_path):
    slow = "        save_checkpoint(args, model, optimizer, epoch)\n"
    script = edited(tmp_path, "single_gpu.py", (slow, slow + "        time.sleep(8)\n"))
    options = ["--epochs", 1, "--checkpoint", tmp_path / "model.pt"]
    both = run_scripts([(tmp_path, script, *options), (tmp_path, script, *options)])
    assert sorted(result.status for result in both) == [0, 2]
    [refused] = [result for result in both if result.status == 2]
    assert refused.stderr.startswith("another run is writing") and len(refused.stderr.splitlines()) == 1
    assert torch.load(tmp_path / "model.pt", weights_only=True)["epoch"] == 1


def test_a_run_that_is_about_to_end_is_waited_for(tmp_path):
    path = tmp_path / "model.pt"
    save_checkpoint(*parts(path), epoch=0)
    ending = FileLock(tmp_path / ".model.pt.lock", thread_local=False)
    ending.acquire()
    end = threading.Timer(0.5, ending.release)
    end.start()
    assert load_checkpoint(*parts(path)) == 1
    end.join()


def test_the_file_of_the_lock_goes_while_nobody_else_can_hold_it_and_it_is_no_error_if_it_stays(tmp_path, monkeypatch):
    release, there = FileLock.release, []
    monkeypatch.setattr(FileLock, "release", lambda lock: (there.append(Path(lock.lock_file).exists()), release(lock)))
    args = parts(tmp_path / "model.pt")[0]
    unlock(lock(args))
    assert there == [False, False]  # for parse_args, and now
    monkeypatch.setattr(Path, "unlink", lambda *_: os.open("/", os.O_WRONLY))  # not allowed
    unlock(lock(args))
    assert there == [False, False, True]


def test_a_run_that_goes_on_is_not_overtaken(tmp_path, capsys):
    path = tmp_path / "model.pt"
    save_checkpoint(*parts(path), epoch=0)
    arguments = parts(path)
    with FileLock(tmp_path / ".model.pt.lock"), pytest.raises(SystemExit):
        load_checkpoint(*arguments)
    assert "another run is writing" in (said := capsys.readouterr().err) and "use another --checkpoint" in said


@pytest.mark.parametrize("same_inode", [False, True])
@pytest.mark.parametrize(("owner", "moment"), [(torch, "load"), (FileLock, "acquire")])
def test_a_file_that_changes_between_reading_and_locking_is_refused(
    owner, moment, same_inode, tmp_path, monkeypatch, capsys
):
    """By a run that ended just now; its file may have the time of the one before, on a coarse clock, or the inode."""
    path, other = tmp_path / "model.pt", tmp_path / "other.pt"
    save_checkpoint(*parts(path), epoch=0)
    save_checkpoint(*parts(other), epoch=1)
    os.utime(other, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))
    call, arguments = getattr(owner, moment), parts(path)

    def late(*args, **names):
        path.write_bytes(other.read_bytes()) if same_inode else other.replace(path)
        return call(*args, **names)

    monkeypatch.setattr(owner, moment, late)
    with pytest.raises(SystemExit):
        load_checkpoint(*arguments)
    assert "another run is writing" in capsys.readouterr().err


def test_a_symbolic_link_stays_and_what_it_points_to_is_written(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/link.pt").symlink_to("real.pt")
    (tmp_path / "model.pt").symlink_to("folder/link.pt")
    trained(tmp_path, epochs=1)
    assert (tmp_path / "model.pt").is_symlink() and (tmp_path / "folder/link.pt").is_symlink()
    assert torch.load(tmp_path / "folder/real.pt", weights_only=True)["epoch"] == 1


def test_runs_with_checkpoints_of_their_own_do_not_disturb_each_other(tmp_path):
    runs = run_scripts(
        [(tmp_path, script, *FAST, "--epochs", 1, "--checkpoint", tmp_path / f"{script}.pt") for script in SCRIPTS],
        nproc=2,
    )
    assert [result.status for result in runs] == [0, 0, 0]
    assert len({round(losses(result)[0], 4) for result in runs}) == 1


def test_processes_that_go_on_from_different_epochs_are_stopped_before_they_save(tmp_path):
    """As on machines that do not share the folder of the checkpoint: rank 1 finds no file."""
    trained(tmp_path, epochs=2)
    before = (tmp_path / "model.pt").read_bytes()
    alone = ("load_checkpoint(args, model, optimizer)", "0 if rank else load_checkpoint(args, model, optimizer)")
    options = "--epochs", 3, "--checkpoint", tmp_path / "model.pt", *FAST
    result = run_script(tmp_path, edited(tmp_path, "ddp_torchrun.py", alone), *options, nproc=2)
    assert result.status == 2 and result.stderr.startswith("the processes go on from different epochs")
    assert len(result.stderr.splitlines()) == 1 and (tmp_path / "model.pt").read_bytes() == before


def test_a_loss_that_is_not_finite_leaves_the_last_good_checkpoint(tmp_path):
    for script, loss in zip(SCRIPTS, ("nan", "inf", "-inf"), strict=True):
        path = tmp_path / f"{script}.pt"
        line = "        check_metrics("
        fault = (line, f"        metrics[0] += 0 if epoch < 1 else float('{loss}')\n{line}")
        options = "--epochs", 3, "--checkpoint", path, *FAST
        result = run_script(tmp_path, edited(tmp_path, script, fault), *options, nproc=2)
        assert result.status == 2 and result.stderr == f"the loss of epoch 2 is {loss}; try an --lr below 0.02\n"
        assert torch.load(path, weights_only=True)["epoch"] == 1
