"""What mp.spawn needs around it: from a file, a notebook or standard input, and whoever ends the run."""

import contextlib
import functools
import logging
import multiprocessing
import os
import signal
import sys
import threading

from torch.multiprocessing import ProcessExitedException


def attached(function):
    """Wrap a function for mp.spawn: a child whose parent was killed while it started ends, and waits for no store.

    Once the function runs, PyTorch interrupts the child when the parent dies.
    """
    return functools.partial(_attached, function)


def _attached(function, *args):
    if not multiprocessing.parent_process().is_alive():
        sys.exit(1)
    function(*args)


@contextlib.contextmanager
def spawning():
    """Start children where no file holds the main program, end as they ended, and leave none behind.

    A child loads the file of the main program; where there is none (`python - < file`), it must not look for it.
    SIGTERM ends the parent as Ctrl-C does, after the children. If the parent is killed, PyTorch has its children
    interrupted (SIGINT), which a shell makes its background jobs ignore; the children must not.

    Raises:
        SystemExit: with code 2, if a child ended with status 2, which says that it has reported a person's error;
            with code 143, on SIGTERM. Every other error of a child passes through.
    """
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    logger = logging.getLogger("torch.multiprocessing.spawn")  # names each process that it ends after an error
    level = logger.level
    handlers, others = {}, multiprocessing.active_children()
    if threading.current_thread() is threading.main_thread():
        handlers[signal.SIGTERM] = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
            handlers[signal.SIGINT] = signal.signal(signal.SIGINT, signal.default_int_handler)
    if file and not os.path.exists(file):
        del main.__file__
    logger.setLevel(logging.ERROR)
    try:
        yield
    except ProcessExitedException as error:
        if error.exit_code != 2:
            raise
        raise SystemExit(2) from None
    finally:
        for child in set(multiprocessing.active_children()) - set(others):
            child.kill()
            child.join()
        logger.setLevel(level)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if file:
            main.__file__ = file
