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
    """Wrap a function for mp.spawn: a child ends with its parent, whatever it is doing.

    When the parent dies, PyTorch has its children interrupted (SIGINT). A shell makes its background jobs ignore that,
    and Python waits with it for the end of a call in C, as for a GPU; here it ends the process. And a child whose
    parent died before would wait for the parent's store.
    """
    return functools.partial(_attached, function)


def _attached(function, *args):
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if not multiprocessing.parent_process().is_alive():
        sys.exit(1)
    function(*args)


@contextlib.contextmanager
def spawning():
    """Start children where no file holds the main program, end as they ended, and leave none behind.

    A child loads the file of the main program; where there is none (`python - < file`), it must not look for it.
    SIGTERM ends the parent as Ctrl-C does, after the children.

    Raises:
        SystemExit: with code 2, if a child ended with status 2, which says that it has reported a person's error;
            with code 143, on SIGTERM. Every other error of a child passes through.
    """
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    logger = logging.getLogger("torch.multiprocessing.spawn")  # names each process that it ends after an error
    level = logger.level
    others = multiprocessing.active_children()
    in_main_thread = threading.current_thread() is threading.main_thread()
    if in_main_thread:
        handler = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
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
        if in_main_thread:
            signal.signal(signal.SIGTERM, handler)
        if file:
            main.__file__ = file
