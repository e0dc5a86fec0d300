"""Train with one process per device: torchrun --standalone --nproc_per_node=2 ddp_torchrun.py"""

import os
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from common.checkpoint import load_checkpoint, save_checkpoint
from common.data import load_data
from common.model import build_model, count_correct
from common.report import check_loss, report_epoch, report_start, show_progress
from common.torchrun import parse_args


# Without this torchrun's report would not show the error of the process that failed first.
@record
def main(argv=None):
    args = parse_args(argv)
    train(args)


def train(args):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        # Without this every process on a machine would train on its first GPU.
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    # Without a group no process could reach another; torchrun:// (common/torchrun.py) is env:// for restarts.
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", init_method="torchrun://")
    rank, world_size = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(args.seed)
    train_set, test_set = load_data(args.dataset, args.data_root)

    # Without a shard of its own every process would train on all images.
    sampler = DistributedSampler(train_set, seed=args.seed, drop_last=True)
    # Without the division the global batch would grow with the number of processes.
    train_loader = DataLoader(train_set, args.batch_size // world_size, sampler=sampler, drop_last=True)
    # Without this stride every process would count all test images.
    test_loader = DataLoader(test_set, args.batch_size, sampler=range(rank, len(test_set), world_size))

    model = build_model(args.model, train_set).to(device)
    report_start(device, args.batch_size, train_set, test_set, model)
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9)
    first_epoch = load_checkpoint(args.checkpoint, vars(args), model=model, optimizer=optimizer)
    # Without this no gradients would be averaged, and the replicas would drift apart.
    ddp_model = DistributedDataParallel(model)

    for epoch in range(first_epoch, args.epochs):
        # Without this every epoch would deal the images in the same order.
        sampler.set_epoch(epoch)
        totals = torch.zeros(4, dtype=torch.float64, device=device)
        start = time.perf_counter()

        for images, labels in show_progress(train_loader, epoch, args.epochs):
            images, labels = images.to(device), labels.to(device)
            # Without the wrapper in this call backward() would average no gradients.
            loss = F.cross_entropy(ddp_model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            totals[0] += loss.detach() * len(labels)
            totals[1] += len(labels)

        totals[2:] = count_correct(model, test_loader, device)
        # Without this sum rank 0 would report the loss and accuracy of its own shard.
        dist.all_reduce(totals)
        check_loss(totals, epoch, args.lr)
        seconds = time.perf_counter() - start
        # Without this condition every process would print the line, and write the same file.
        if rank == 0:
            report_epoch(totals, epoch, args.epochs, seconds)
            save_checkpoint(args.checkpoint, vars(args), epoch, model=model, optimizer=optimizer)

    # Without this NCCL would warn at exit, and gloo's threads would outlive the training.
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
