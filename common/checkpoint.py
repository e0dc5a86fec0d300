"""The checkpoint: one file for all scripts and any number of processes, replaced as a whole or not at all."""

import contextlib
import io
import os
import textwrap
import weakref
import zipfile
from pathlib import Path

import torch
from filelock import FileLock, Timeout
from torch.optim.lr_scheduler import LRScheduler

from common import report
from common.report import exit_with_error, print_line

SETTINGS = ("dataset", "model", "batch_size", "lr", "seed")  # a change of these would silently train something else
_locked = {}  # what unlocks each file
broadcast_object_list = list  # to nobody; in a group of processes its launcher's module puts PyTorch's function here


def load_checkpoint(path, options, *, model, optimizer, **others):
    """Load a checkpoint, if the file exists, and return its number of finished epochs, or else 0.

    Rank 0 reads it for all, and locks it while the model exists. Whatever is named (scheduler=scheduler) is restored.
    """
    if path is None:
        return 0
    objects, problem = _by_name(model, optimizer, others), "is damaged or not a checkpoint of these scripts"
    received = [_lock_and_read(path, model) if report.rank == 0 else None]
    broadcast_object_list(received)
    [data] = received
    if data is None:
        return 0
    if isinstance(data, str):
        exit_with_error(data)
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:  # torch.load does not compare the checksums in it
            if damaged := archive.testzip():
                raise ValueError(f"wrong checksum of {damaged}")
        state = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        for name, value in [(name, state["settings"][name]) for name in SETTINGS]:
            if value != options[name]:
                made = f"--{name.replace('_', '-')} {value}"
                exit_with_error(f"{path} was made with {made}, not {options[name]}; use that, or another --checkpoint")
        problem, epoch = f"does not fit this {' and '.join(objects)}", state["epoch"]
        if type(epoch) is not int or epoch < 1:
            raise ValueError(f"epoch {epoch}")
        if unused := state.keys() - objects.keys() - {"epoch", "settings"}:
            raise ValueError(f"nothing here loads {', '.join(unused)}")
        if _fixed(optimizer.state_dict()) != _fixed(state["optimizer"]):
            raise ValueError("another optimizer")
        for name, object in objects.items():
            object.load_state_dict(state[name])
    except Exception as error:
        reason = textwrap.shorten(f"{type(error).__name__}: {error}", 200, placeholder=" …")
        exit_with_error(f"{path} {problem} ({reason}); move it away, or use another --checkpoint")
    if report.rank == 0:
        print_line(f"resuming from {path} after epoch {epoch} of {options['epochs']} (--epochs)")
    return epoch


def save_checkpoint(path, options, epoch, *, model, optimizer, **others):
    """Replace a checkpoint after an epoch (counted from 0); after the last one print where the model is.

    The arguments are those of load_checkpoint(). Exits if it cannot be written; the one before stays as it was.
    """
    if path is not None:
        state = {name: object.state_dict() for name, object in _by_name(model, optimizer, others).items()}
        state |= {"epoch": epoch + 1, "settings": {name: options[name] for name in SETTINGS}}
        target, data = Path(os.path.realpath(path)), io.BytesIO()  # a symbolic link stays
        temporary = target.with_name(f".{target.name}.tmp")  # one name, so that those of killed runs cannot pile up
        torch.save(state, data)
        try:
            temporary.unlink(missing_ok=True)  # or a pipe would be waited for, and what a link points to overwritten
            with open(temporary, "wb") as file:
                file.write(data.getbuffer())
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, target)
        except OSError as error:
            exit_with_error(f"epoch {epoch + 1} cannot be saved in {path} ({error}); it is as it was before")
        finally:
            temporary.unlink(missing_ok=True)
    if epoch + 1 == options["epochs"]:
        print_line(f"saved in {path}" if path else "not saved; --checkpoint PATH saves the model")


def _by_name(model, optimizer, others):
    scheduled = any("initial_lr" in group for group in optimizer.param_groups)
    if scheduled and not any(isinstance(object, LRScheduler) for object in others.values()):
        raise ValueError("load_checkpoint and save_checkpoint need the scheduler of the learning rate by name")
    return {"model": model, "optimizer": optimizer, **others}


def _lock_and_read(path, model):
    """The bytes of a checkpoint, None without a file, or a str that says why it cannot be used."""
    target = Path(os.path.realpath(path))
    if not target.parent.is_dir():
        return f"--checkpoint {path} has no folder; make it first, or name another"
    if os.path.exists(target) and not target.is_file():
        return f"--checkpoint {path} is a folder, a device or a pipe; name a file"
    _locked.pop(target, bool)()  # by a run before in this process, whose model a traceback may keep
    lock = FileLock(target.with_name(f".{target.name}.lock"), timeout=5)
    try:
        lock.acquire()
        _locked[target] = weakref.finalize(model, _unlock, lock)
        return target.read_bytes() if target.exists() else None
    except Timeout:
        return f"another run is writing {path}; wait for it, end it, or use another --checkpoint"
    except OSError as error:
        return f"--checkpoint {path} cannot be used ({error}); name a file that you may read and write"


def _unlock(lock):
    with contextlib.suppress(OSError):
        os.unlink(lock.lock_file)  # while no other process can hold it
    lock.release()


def _fixed(optimizer_state):
    """What is on in each group of an optimizer and does not change in training."""
    driven = {"lr", "initial_lr", "max_lr", "min_lr", "swa_lr", "base_momentum", "max_momentum"}  # by a scheduler
    groups = optimizer_state["param_groups"]
    if any("max_momentum" in group for group in groups):  # OneCycleLR, CyclicLR
        driven |= {"momentum", "betas"}
    return [{name: on for name, on in group.items() if on and name not in driven} for group in groups]
