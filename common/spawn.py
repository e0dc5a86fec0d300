"""What ddp_mp_spawn.py needs because it starts its processes itself: a free port, and one end for all."""

import contextlib
import functools
import logging
import multiprocessing
import os
import signal
import sys
from unittest import mock

import torch.distributed as dist
import torch.distributed.nn  # noqa: F401  (later, with a group, its import would keep gloo's threads)
from torch.multiprocessing import ProcessExitedException

from common import checkpoint, options, report

logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)  # or it names each process that it ends
parse_args = functools.partial(options.parse_args, local_world_size=None)


def end_together(main):
    """Decorate a function that calls mp.spawn: what ends one of its processes ends all, with the same status."""

    @functools.wraps(main)
    def wrapped(*args):
        others, program = multiprocessing.active_children(), sys.modules["__main__"]
        if not os.path.exists(getattr(program, "__file__", ".")):  # python - < file
            del program.__file__  # or the children would look for it
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # on a port that is free
        meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
        meet |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}  # or rank 0 opens another
        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.dict(os.environ, meet))
            with contextlib.suppress(ValueError):  # a thread sets no handlers
                sigterm = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
                stack.callback(signal.signal, signal.SIGTERM, sigterm)
            try:
                return main(*args)
            except ProcessExitedException as error:
                if error.exit_code == 2:  # the child has printed a person's error
                    raise SystemExit(2) from None
                raise
            finally:
                for child in set(multiprocessing.active_children()) - set(others):
                    child.kill()
                    child.join()

    return wrapped


def _rendezvous(url, **timeout):
    """env://, in a child that ends with its parent, at whose death PyTorch has it interrupted."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a background job ignores it, and Python waits for calls in C
    if not multiprocessing.parent_process().is_alive():  # already
        sys.exit(1)
    store, report.rank, report.world_size = next(dist.rendezvous(url.replace("spawn:", "env:"), **timeout))
    checkpoint.broadcast_object_list = dist.broadcast_object_list
    options.set_threads(report.world_size)
    yield store, report.rank, report.world_size


dist.register_rendezvous_handler("spawn", _rendezvous)
