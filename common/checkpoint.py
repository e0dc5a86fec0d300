"""The checkpoint: one file for all scripts and any number of processes, replaced as a whole or not at all."""

import os

import torch

from common.errors import refuse

SETTINGS = ("dataset", "model", "batch_size", "lr", "seed")  # what would silently train something else


def load_checkpoint(args, model, optimizer):
    """Read --checkpoint into model and optimizer, if the file exists.

    Returns:
        int: epochs that the file has finished; 0 without a file.
    Raises:
        SystemExit: the file is not a checkpoint of this project, or was made with other settings.
    """
    if args.checkpoint is None or not args.checkpoint.exists():
        return 0
    try:
        state = torch.load(args.checkpoint, map_location="cpu", weights_only=True)
        settings, epoch = state["settings"], state["epoch"]
    except Exception as error:
        refuse(args, f"{args.checkpoint} is not a checkpoint of this run ({type(error).__name__}); choose another path")
    for name in SETTINGS:
        if settings[name] != getattr(args, name):
            option = "--" + name.replace("_", "-")
            refuse(
                args,
                f"{args.checkpoint} was made with {option} {settings[name]}, not {getattr(args, name)}; "
                f"use {option} {settings[name]}, or another --checkpoint",
            )
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return epoch


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
