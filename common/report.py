"""What a run prints: a line at the start, a line an epoch, and the one line of an error that a person caused."""

import os
import sys
import time

import torch

rank, world_size = 0, 1  # of this process, unless its launcher's module sets them
SECONDS_FOR_RANK_0 = 10  # to print an error that all ranks meet, and to end the run


def report_start(device, batch_size, train_set, test_set, model):
    """Print what is trained on what; exit if the global batch is larger than the training set."""
    if batch_size > len(train_set):
        exit_with_error(f"--batch-size {batch_size} exceeds the {len(train_set)} training images; use a smaller one")
    cpu = f"CPU (threads each: {torch.get_num_threads()})"
    where = torch.cuda.get_device_name() if device.type == "cuda" else cpu
    if rank == 0:
        print_line(
            f"{world_size} process{'es' * (world_size > 1)} on {where}; "
            f"{len(train_set):,} training and {len(test_set):,} test images; global batch {batch_size}; "
            f"{sum(parameter.numel() for parameter in model.parameters()):,} parameters"
        )


def show_progress(loader, epoch, epochs):
    """Yield the batches of an epoch (counted from 0); on a terminal rewrite one line, at most twice a second."""
    if rank != 0 or not sys.stdout or not sys.stdout.isatty():
        yield from loader
        return
    images, start, shown = 0, time.perf_counter(), time.perf_counter()
    for step, batch in enumerate(loader, 1):
        yield batch
        images += len(batch[1]) * world_size
        seconds = time.perf_counter() - start
        if start + seconds - shown >= 0.5:
            shown = start + seconds
            eta = (len(loader) * (epochs - epoch) - step) * seconds / step
            name = f"epoch {epoch + 1:{len(str(epochs))}}/{epochs}"
            done = f"{step / len(loader):4.0%}  {images / seconds:,.0f} images/s  eta {eta:.0f} s"
            print_line(f"\x1b[K{name}  {done}", end="\r")  # the line of the epoch is longer


def check_loss(totals, epoch, lr):
    """Exit, before anything is saved, if the sum of the losses, totals[0], is not finite."""
    if not totals[0].isfinite():
        exit_with_error(f"the loss of epoch {epoch + 1} is {totals[0].item()}; try an --lr below {lr:g}")


def report_epoch(totals, epoch, epochs, seconds):
    """Print the line of an epoch (counted from 0), which took so many seconds with its evaluation.

    totals: float64 (4,), sums over all processes: training losses, training images, correct test images, test images.
    """
    loss_sum, images, correct, tested = totals.tolist()
    print_line(
        f"epoch {epoch + 1:{len(str(epochs))}}/{epochs}  loss {loss_sum / images:.6f}  "
        f"test accuracy {correct / tested:.2%}  {images / seconds:,.0f} images/s  "
        f"eta {(epochs - epoch - 1) * seconds:.0f} s"
    )


def print_line(line, end="\n"):
    """Print a line at once, and train on if stdout lacks a letter of it, a reader (`| head`), or space on its disk."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    try:
        print(line.encode(encoding, "backslashreplace").decode(encoding), end=end, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def exit_with_error(message):
    """Print the fact and the way out, one line on stderr from one process, and raise SystemExit(2)."""
    if rank != 0:
        time.sleep(SECONDS_FOR_RANK_0)  # and is ended meanwhile by what started it
    print(" ".join(message.split()), file=sys.stderr)
    raise SystemExit(2)
