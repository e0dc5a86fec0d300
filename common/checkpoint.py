"""The checkpoint: one file for all scripts and any number of processes, replaced as a whole or not at all."""

import io
import os
import textwrap
import weakref
import zipfile

import torch

from common.errors import refuse
from common.path import lock, refuse_other_run, remove, unlock
from common.report import say

SETTINGS = ("dataset", "model", "batch_size", "lr", "seed")  # a change of these would silently train something else


def load_checkpoint(args, model, optimizer):
    """Read --checkpoint into model and optimizer, if the file exists, and keep other runs from writing it.

    Returns:
        int: the epochs that the file has finished; 0 without a file.
    Raises:
        SystemExit: the file is damaged or no checkpoint of these scripts, its settings or its model are others, or
            another run is writing it.
    """
    if args.checkpoint is None:
        return 0
    before = _stamp(args.checkpoint)
    epoch = _load(args, model, optimizer) if before else 0
    if args.speaks:  # the process that writes
        args.lock = lock(args)
        weakref.finalize(args, unlock, args.lock)
        if _stamp(args.checkpoint) != before:
            refuse_other_run(args)
    return epoch


def _stamp(path):
    """What changes when the file is replaced; None without a file."""
    return (path.stat().st_ino, path.stat().st_mtime_ns) if path.exists() else None


def _load(args, model, optimizer):
    try:
        state = _read(args.checkpoint)
        settings = {name: state["settings"][name] for name in SETTINGS}
    except Exception as error:
        reason = textwrap.shorten(f"{type(error).__name__}: {error}", 200, placeholder=" …")
        refuse(args, f"{args.checkpoint} is damaged or not a checkpoint of these scripts ({reason}); move it away")
    for name, value in settings.items():
        if value != getattr(args, name):
            option = f"--{name.replace('_', '-')}"
            way_out = f"use {option} {value}, or another --checkpoint"
            refuse(args, f"{args.checkpoint} was made with {option} {value}, not {getattr(args, name)}; {way_out}")
    try:
        model.load_state_dict(state["model"])
        saved, own = state["optimizer"]["param_groups"], optimizer.state_dict()["param_groups"]
        if [{**group, "lr": 0} for group in saved] != [{**group, "lr": 0} for group in own]:
            raise ValueError("another optimizer")
        optimizer.load_state_dict({**state["optimizer"], "param_groups": own})  # the rate is --lr, or a schedule's
        if type(state["epoch"]) is not int or state["epoch"] < 1:
            raise ValueError(f"epoch {state['epoch']}")
        return state["epoch"]
    except Exception as error:
        reason = textwrap.shorten(f"{type(error).__name__}: {error}", 200, placeholder=" …")
        refuse(args, f"{args.checkpoint} does not fit this model and optimizer ({reason}); use another one")


def _read(path):
    """A checkpoint in the CPU's memory; an exception if a bit of it is wrong, or if it holds more than plain data."""
    data = path.read_bytes()
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        damaged = archive.testzip()  # torch.load does not compare the checksums that its format holds
    if damaged:
        raise ValueError(f"wrong checksum of {damaged}")
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def save_checkpoint(args, model, optimizer, epoch):
    """Replace --checkpoint, if it is given; after the last epoch print where the model is.

    Args:
        epoch (int): the epoch just finished, counted from 0.
    Raises:
        SystemExit: it cannot be written; the checkpoint before it is left as it was.
    """
    if args.checkpoint is not None:
        state = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "epoch": epoch + 1,
            "settings": {name: getattr(args, name) for name in SETTINGS},
        }
        data, temporary = io.BytesIO(), args.checkpoint.with_name(f".{args.checkpoint.name}.tmp")
        torch.save(state, data)
        remove(temporary)  # one name for all, so that those of killed runs cannot pile up
        try:
            with open(temporary, "wb") as file:
                file.write(data.getbuffer())
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, args.checkpoint)
        except OSError as error:
            refuse(args, f"epoch {epoch + 1} cannot be saved in {args.checkpoint} ({error}); it is as it was before")
        finally:
            remove(temporary)
    if epoch + 1 == args.epochs:
        where = f"saved in {args.checkpoint}" if args.checkpoint else "not saved; --checkpoint PATH saves the model"
        say(where)
