"""What the fork server loads once, so that each process of a test starts in milliseconds. No tensor work here."""

import torch  # noqa: F401
import torch._dynamo  # noqa: F401  (the optimizers load it at their first use)
import torch.distributed  # noqa: F401
import torch.nn.parallel  # noqa: F401
import torch.profiler  # noqa: F401
import torch.utils.data  # noqa: F401

import common.checkpoint  # noqa: F401
import common.options  # noqa: F401
