"""The path of --checkpoint: where it may be, and the lock that lets one run at a time write it."""

import os
from pathlib import Path

from filelock import FileLock, Timeout

from common.errors import refuse


def check_path(args):
    """Refuse a --checkpoint that could not be written after the first epoch, or that another run is writing.

    Raises:
        SystemExit: as said.
    """
    path = args.checkpoint
    if path is None:
        return
    if os.path.islink(path):  # what it points to is written and locked, and the link stays
        args.checkpoint = path = Path(os.path.realpath(path))
    if os.path.isdir(path):
        refuse(args, f"--checkpoint {path} is a folder; name a file in it, such as {path / 'model.pt'}")
    if not os.path.isdir(path.parent):
        refuse(args, f"--checkpoint {path} has no folder; make it first: mkdir -p {path.parent}")
    if not os.access(path.parent, os.W_OK | os.X_OK) or os.path.exists(path) and not os.access(path, os.R_OK):
        refuse(args, f"--checkpoint {path} cannot be written or read by this user; choose another folder")
    if args.speaks:  # before the others of this run wait for this process, which an error here would end
        unlock(lock(args))


def lock(args):
    """Lock --checkpoint for this process until unlock(), or until the process ends, however it ends.

    Returns:
        FileLock: held.
    Raises:
        SystemExit: another run holds it, and still does five seconds later.
    """
    held = FileLock(args.checkpoint.with_name(f".{args.checkpoint.name}.lock"), timeout=5)
    try:
        held.acquire()
    except Timeout:
        refuse_other_run(args)
    return held


def unlock(held):
    """Take the file of the lock away, while no other process can hold it, and release the lock."""
    Path(held.lock_file).unlink(missing_ok=True)
    held.release()


def refuse_other_run(args):
    refuse(args, f"another run is writing {args.checkpoint}; wait for it, end it, or use another --checkpoint")
