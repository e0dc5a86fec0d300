"""What mp.spawn needs around it on any machine, from a file, a notebook or standard input."""

import contextlib
import logging
import os
import sys

from torch.multiprocessing import ProcessExitedException


@contextlib.contextmanager
def spawning():
    """Start children where no file holds the main program, and end as they ended.

    A child loads the file of the main program; where there is none (`python - < file`), it must not look for it.

    Raises:
        SystemExit: with code 2, if a child ended with status 2, which says that it has reported a person's error.
            Every other error of a child passes through.
    """
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    logger = logging.getLogger("torch.multiprocessing.spawn")  # names each process that it ends after an error
    level = logger.level
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
        logger.setLevel(level)
        if file:
            main.__file__ = file
