"""Errors that a person caused: one line that says what is wrong and what to type instead, and exit status 2."""

import sys
import time


def refuse(args, message):
    """Print one line on stderr and end this process with status 2.

    Of the processes that run the same check on one machine only one has args.speaks set. The others first wait to be
    ended by whatever started them, so that the line appears once; where they alone met the error, they say it then.

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
