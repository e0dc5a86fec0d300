"""Train with a process for each device of this machine, which this script starts: python ddp_mp_spawn.py"""

import time

import torch
import torch.distributed as dist
# Without this import before the group is made, gloo's threads would outlive the group and could crash the exit.
import torch.distributed.nn
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from common.checkpoint import load_checkpoint, save_checkpoint
from common.data import load_data
from common.evaluation import count_correct
from common.model import build_model
from common.options import parse_args
from common.report import check_metrics, describe, report
from common.spawning import attached, spawning


def main(argv=None):
    args = parse_args(argv, world_size=None)
    # Without a port that is already open two runs that start together could choose the same one.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with spawning():
        mp.spawn(attached(train), args=(args, store.port), nprocs=args.world_size)


def train(rank, args, port):
    # Without this every process would print the opening line, and the same error.
    args.speaks = rank == 0
    # Without its own device and threads a process would use GPU 0, and on the CPU one core (torchrun) or all (spawn).
    device = torch.device(f"cuda:{rank}" if torch.cuda.is_available() else "cpu")
    backend, device_id = ("nccl", device) if device.type == "cuda" else ("gloo", None)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.set_num_threads(args.threads)
    # Without a group no process could reach another.
    store = dist.TCPStore("127.0.0.1", port)
    dist.init_process_group(backend, store=store, rank=rank, world_size=args.world_size, device_id=device_id)

    torch.manual_seed(args.seed)
    train_set, test_set = load_data(args)

    # Without these shares every process would take every image, and the global batch would grow N times.
    sampler = DistributedSampler(train_set, seed=args.seed, drop_last=True)
    train_loader = DataLoader(train_set, args.batch_size // args.world_size, sampler=sampler, drop_last=True)
    test_loader = DataLoader(test_set, args.batch_size, sampler=range(rank, len(test_set), args.world_size))

    model = build_model(args, train_set).to(device)
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9)
    first_epoch = load_checkpoint(args, model, optimizer)
    describe(args, first_epoch, device, model, train_set, test_set)
    # Without this no gradients would be averaged, and the replicas would drift apart.
    ddp_model = DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)

    for epoch in range(first_epoch, args.epochs):
        # Without this every epoch would take the images in the same order.
        sampler.set_epoch(epoch)
        metrics = torch.tensor([0, 0, 0, 0, epoch], dtype=torch.float64, device=device)
        start = time.perf_counter()

        for images, labels in train_loader:
            images, labels = images.to(device), labels.to(device)
            # Without the wrapper in this call backward() would average no gradients.
            loss = F.cross_entropy(ddp_model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            metrics[0] += loss.detach() * len(labels)
            metrics[1] += len(labels)

        metrics[2:4] = count_correct(model, test_loader, device)
        # Without this sum rank 0 would report the loss and accuracy of its own share.
        dist.all_reduce(metrics)
        check_metrics(args, epoch, metrics)
        seconds = time.perf_counter() - start
        # Without this condition every process would print the line, and write the same file.
        if rank == 0:
            report(args, epoch, metrics, seconds)
            save_checkpoint(args, model, optimizer, epoch)

    # Without this NCCL would warn at exit, and gloo's threads would outlive the training.
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
