"""Train with a process for each device: torchrun --standalone --nproc_per_node=2 ddp_torchrun.py"""

import os
import time

import torch
import torch.distributed as dist
# Without this import before the group is made, gloo's threads would outlive the group and could crash the exit.
import torch.distributed.nn
import torch.nn.functional as F
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from common.checkpoint import load_checkpoint, save_checkpoint
from common.data import load_data
from common.evaluation import count_correct
from common.model import build_model
from common.options import parse_args
from common.report import check_metrics, describe, report


# Without this torchrun's report would not show the error of the process that failed first.
@record
def main(argv=None):
    # Without torchrun's variables no process would know how many there are, on this machine and in all.
    world_size, local_world_size = int(os.environ.get("WORLD_SIZE") or 0), int(os.environ.get("LOCAL_WORLD_SIZE") or 0)
    args = parse_args(argv, world_size, local_world_size, speaks=os.environ.get("RANK", "0") == "0")
    train(args)


def train(args):
    local_rank = int(os.environ["LOCAL_RANK"])
    # Without its own device and threads a process would use GPU 0, and on the CPU one core (torchrun) or all (spawn).
    device = torch.device(f"cuda:{local_rank}" if torch.cuda.is_available() else "cpu")
    backend, device_id = ("nccl", device) if device.type == "cuda" else ("gloo", None)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.set_num_threads(args.threads)
    # Without names of its own in torchrun's store a restarted group would find the addresses of dead processes.
    store, rank, _ = next(dist.rendezvous("env://"))
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        store = dist.PrefixStore(os.environ["TORCHELASTIC_RESTART_COUNT"], store)
    # Without a group no process could reach another.
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
