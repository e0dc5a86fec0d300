"""The path of --checkpoint: where it may be, and the lock that lets one run at a time write it."""

import contextlib
import os
import shlex
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
    if os.path.exists(path) and not os.path.isfile(path):
        refuse(args, f"--checkpoint {path} is a device or a pipe; name a file")
    if not os.path.isdir(path.parent):
        refuse(args, f"--checkpoint {path} has no folder; make it first: mkdir -p {shlex.quote(str(path.parent))}")
    if not os.access(path.parent, os.W_OK | os.X_OK) or os.path.exists(path) and not os.access(path, os.R_OK):
        refuse(args, f"--checkpoint {path} cannot be written or read by this user; choose another folder")
    if args.speaks:  # before the others of this run wait for this process, which an error here would end
        unlock(lock(args))


def lock(args):
    """Lock --checkpoint for this process until unlock(), or until the process ends, however it ends.

    Returns:
        FileLock: held.
    Raises:
        SystemExit: another run holds it, and still does five seconds later; or it cannot be made.
    """
    held = FileLock(args.checkpoint.with_name(f".{args.checkpoint.name}.lock"), timeout=5)
    try:
        held.acquire()
    except Timeout:
        refuse_other_run(args)
    except OSError as error:  # the name is too long, or the lock is that of a killed run of another user
        refuse(args, f"--checkpoint {args.checkpoint} cannot be locked ({error}); use another one")
    return held


def unlock(held):
    """Take the file of the lock away, while no other process can hold it, and release the lock."""
    remove(Path(held.lock_file))
    held.release()


def remove(path):
    """Delete a file, if it is there and that is allowed."""
    with contextlib.suppress(OSError):
        path.unlink()


def refuse_other_run(args):
    """End this process with one line: --checkpoint is another run's.

    Raises:
        SystemExit: always.
    """
    refuse(args, f"another run is writing {args.checkpoint}; wait for it, end it, or use another --checkpoint")
