"""What a run prints: a line at the start, and a line an epoch; and what ends a run that cannot go on."""

import os
import sys

import torch

from common.errors import refuse


def describe(args, first_epoch, device, model, train_set, test_set):
    """Print what is trained on what, and from where it goes on, if args.speaks.

    Args:
        first_epoch (int): epochs that are already finished.
    Raises:
        SystemExit: the batch is larger than the training set.
    """
    if args.batch_size > len(train_set):
        images = f"the {len(train_set)} training images"
        refuse(args, f"--batch-size {args.batch_size} is more than {images}; use a smaller one")
    if not args.speaks:
        return
    threads = torch.get_num_threads()
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU with {_count(threads, 'thread')}"
    say(
        f"{_count(args.world_size, 'process', 'processes')} on {where}{' each' if args.world_size > 1 else ''}; "
        f"{args.dataset}: {len(train_set):,} training and {len(test_set):,} test images; "
        f"global batch {args.batch_size}; {args.model}: {sum(p.numel() for p in model.parameters()):,} parameters"
    )
    if first_epoch >= args.epochs:
        say(f"{args.checkpoint} has {first_epoch} epochs already; --epochs says how many in all")
    elif first_epoch:
        say(f"going on from {args.checkpoint} after epoch {first_epoch}")


def check_metrics(args, epoch, metrics):
    """End the run, before it is saved, if the loss is not finite or the processes are not in the same epoch.

    Args:
        epoch (int): counted from 0.
        metrics (Tensor): as for report().
    Raises:
        SystemExit: one of the two.
    """
    if metrics[4] != epoch * args.world_size:
        refuse(args, f"the processes go on from different epochs; all machines must share the file {args.checkpoint}")
    if not metrics[0].isfinite():
        refuse(args, f"the loss of epoch {epoch + 1} is {metrics[0].item()}; try an --lr below {args.lr:g}")


def report(args, epoch, metrics, seconds):
    """Print the line of an epoch.

    Args:
        epoch (int): counted from 0.
        metrics (Tensor): float64 (5,), each a sum over all processes: losses, training images, correct test images,
            test images, epoch.
        seconds (float): what the epoch took, training and evaluation; images/s are training images in that time.
    """
    loss_sum, images, correct, tested, _ = metrics.tolist()
    say(
        f"epoch {epoch + 1:{len(str(args.epochs))}}/{args.epochs}  loss {loss_sum / images:.6f}  "
        f"test accuracy {correct / tested:.2%}  {images / seconds:,.0f} images/s  "
        f"eta {(args.epochs - epoch - 1) * seconds:.0f} s"
    )


def say(line):
    """Print a line at once; train on in silence if nobody reads any longer, as behind `| head`, or the disk is full."""
    try:
        print(line, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _count(number, one, many=None):
    return f"{number} {one if number == 1 else many or one + 's'}"
