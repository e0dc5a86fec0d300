"""What a run prints, by one process: a line at the start, and a line an epoch. It also ends a run that cannot go on."""

import math

import torch

from common.errors import refuse


def describe(args, first_epoch, device, model, train_set, test_set):
    """Print what is trained on what, and from where it goes on.

    Args:
        first_epoch (int): epochs that are already finished.
    Raises:
        SystemExit: the batch is larger than the training set.
    """
    if args.batch_size > len(train_set):
        refuse(args, f"--batch-size {args.batch_size} is more than the {len(train_set)} training images")
    threads = torch.get_num_threads()
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU with {_count(threads, 'thread')}"
    print(
        f"{_count(args.world_size, 'process', 'processes')} on {where}{' each' if args.world_size > 1 else ''}; "
        f"{args.dataset}: {len(train_set):,} training and {len(test_set):,} test images; "
        f"global batch {args.batch_size}; {args.model}: {sum(p.numel() for p in model.parameters()):,} parameters",
        flush=True,
    )
    if first_epoch >= args.epochs:
        print(f"{args.checkpoint} has {first_epoch} epochs already; --epochs says how many in all", flush=True)
    elif first_epoch:
        print(f"going on from {args.checkpoint} after epoch {first_epoch}", flush=True)


def report(args, epoch, metrics, seconds):
    """Print the line of an epoch.

    Args:
        epoch (int): counted from 0.
        metrics (Tensor): sum of the losses, training images, correct test images, test images, of all processes.
        seconds (float): what the epoch took, training and evaluation.
    Raises:
        SystemExit: the loss is infinite or not a number.
    """
    loss_sum, images, correct, tested = metrics.tolist()
    if not math.isfinite(loss_sum):
        refuse(args, f"the loss of epoch {epoch + 1} is {loss_sum}; try an --lr below {args.lr:g}")
    print(
        f"epoch {epoch + 1:{len(str(args.epochs))}}/{args.epochs}  loss {loss_sum / images:.6f}  "
        f"test accuracy {correct / tested:.2%}  {images / seconds:,.0f} images/s  "
        f"eta {(args.epochs - epoch - 1) * seconds:.0f} s",
        flush=True,
    )


def _count(number, one, many=None):
    return f"{number} {one if number == 1 else many or one + 's'}"
