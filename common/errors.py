"""Errors that a person caused: one line that says what is wrong and what to type instead, and exit status 2.

torchrun turns the status into 1 and adds a report of its own.
"""

import sys
import time


def refuse(args, message):
    """Print one line on stderr and end this process with status 2.

    Of the processes that make the same check only one has args.speaks set. The others wait to be ended by whatever
    started them, so that the line appears once; if only they met the error, they print it after the wait.

    Args:
        args: the options, with args.speaks (bool).
        message (str): the fact and the way out, in one line.
    Raises:
        SystemExit: always, with code 2.
    """
    if not args.speaks:
        time.sleep(10)
    print(" ".join(message.split()), file=sys.stderr, flush=True)
    raise SystemExit(2)
