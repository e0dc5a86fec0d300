"""What ddp_torchrun.py needs because torchrun starts it: its variables, its default of one thread, its restarts."""

import os
import sys

import torch.distributed as dist
import torch.distributed.nn  # noqa: F401  (later, with a group, its import would keep gloo's threads)

from common import checkpoint, options, report

VARIABLES = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]


def parse_args(argv=None):
    """As in common/options.py, in a process of torchrun, or of another launcher that sets these variables."""
    if missing := [name for name in VARIABLES if not os.environ.get(name)]:
        options.parse_args(argv)  # for --help
        script = os.path.basename(sys.argv[0]) if sys.argv[0].endswith(".py") else "ddp_torchrun.py"
        way_out = f"start this script with torchrun: torchrun --standalone --nproc_per_node=2 {script}"
        report.exit_with_error(way_out if missing == VARIABLES else f"{', '.join(missing)} not set; {way_out}")
    report.rank, report.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_world_size = int(os.environ["LOCAL_WORLD_SIZE"])
    if local_world_size > 1 and os.environ.get("OMP_NUM_THREADS") == "1":
        del os.environ["OMP_NUM_THREADS"]  # torchrun sets it where nobody chose, which leaves most cores idle
    checkpoint.broadcast_object_list = dist.broadcast_object_list
    return options.parse_args(argv, local_world_size)


def _rendezvous(url, **timeout):
    """env://, with other keys after each restart, for the store keeps the addresses of dead processes."""
    store, rank, world_size = next(dist.rendezvous("env://", **timeout))
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        store = dist.PrefixStore(os.environ["TORCHELASTIC_RESTART_COUNT"], store)
    yield store, rank, world_size


dist.register_rendezvous_handler("torchrun", _rendezvous)
