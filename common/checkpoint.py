"""The checkpoint: one file for all scripts and any number of processes, replaced as a whole or not at all."""

import os

import torch

from common.errors import refuse

SETTINGS = ("dataset", "model", "batch_size", "lr", "seed")  # a change of these would silently train something else


def check_path(args):
    """See before the first step whether --checkpoint can be written.

    Raises:
        SystemExit: it is a folder, its folder does not exist, or one of them gives no permission.
    """
    path = args.checkpoint
    if path is None:
        return
    if path.is_dir():
        refuse(args, f"--checkpoint {path} is a folder; name a file in it, such as {path / 'model.pt'}")
    if not path.parent.is_dir():
        refuse(args, f"--checkpoint {path} has no folder; make it first: mkdir -p {path.parent}")
    if not os.access(path.parent, os.W_OK | os.X_OK) or path.exists() and not os.access(path, os.R_OK):
        refuse(args, f"--checkpoint {path} cannot be written or read by this user; choose another folder")


def load_checkpoint(args, model, optimizer):
    """Read --checkpoint into model and optimizer, if the file exists.

    Returns:
        int: the epochs that the file has finished; 0 without a file.
    Raises:
        SystemExit: see read_checkpoint().
    """
    state = read_checkpoint(args)
    if state is None:
        return 0
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["epoch"]


def read_checkpoint(args):
    """Read --checkpoint into the CPU's memory.

    Returns:
        dict: model, optimizer (state dicts), epoch (int: finished), settings; None without a file.
    Raises:
        SystemExit: the file is not a checkpoint of these scripts, or was made with other settings.
    """
    if args.checkpoint is None or not args.checkpoint.exists():
        return None
    try:
        state = torch.load(args.checkpoint, map_location="cpu", weights_only=True)
        settings = {name: state["settings"][name] for name in SETTINGS}
    except Exception as error:
        reason = type(error).__name__
        refuse(args, f"{args.checkpoint} is not a checkpoint of these scripts ({reason}); choose another --checkpoint")
    for name in SETTINGS:
        if settings[name] != getattr(args, name):
            option = "--" + name.replace("_", "-")
            refuse(
                args,
                f"{args.checkpoint} was made with {option} {settings[name]}, not {getattr(args, name)}; "
                f"use {option} {settings[name]}, or another --checkpoint",
            )
    return state


def save_checkpoint(args, model, optimizer, epoch):
    """Replace --checkpoint, if it is given; after the last epoch print where the model is.

    Args:
        epoch (int): the epoch just finished, counted from 0.
    """
    if args.checkpoint is not None:
        state = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "epoch": epoch + 1,
            "settings": {name: getattr(args, name) for name in SETTINGS},
        }
        temporary = args.checkpoint.with_name(args.checkpoint.name + ".tmp")
        with open(temporary, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, args.checkpoint)
    if epoch + 1 == args.epochs:
        print(f"saved in {args.checkpoint}" if args.checkpoint else "not saved; --checkpoint PATH saves the model", flush=True)
