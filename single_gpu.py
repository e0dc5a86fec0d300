"""Train on one device, a GPU or the CPU: python single_gpu.py"""

import time

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, RandomSampler

from common.checkpoint import load_checkpoint, save_checkpoint
from common.data import load_data
from common.evaluation import count_correct
from common.model import build_model
from common.options import parse_args
from common.report import check_metrics, describe, report


def main(argv=None):
    args = parse_args(argv)
    train(args)


def train(args):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    torch.manual_seed(args.seed)
    train_set, test_set = load_data(args)

    sampler = RandomSampler(train_set, generator=torch.Generator())
    train_loader = DataLoader(train_set, args.batch_size, sampler=sampler, drop_last=True)
    test_loader = DataLoader(test_set, args.batch_size)

    model = build_model(args, train_set).to(device)
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9)
    first_epoch = load_checkpoint(args, model, optimizer)
    describe(args, first_epoch, device, model, train_set, test_set)

    for epoch in range(first_epoch, args.epochs):
        sampler.generator.manual_seed(args.seed + epoch)
        metrics = torch.tensor([0, 0, 0, 0, epoch], dtype=torch.float64, device=device)
        start = time.perf_counter()

        for images, labels in train_loader:
            images, labels = images.to(device), labels.to(device)
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            metrics[0] += loss.detach() * len(labels)
            metrics[1] += len(labels)

        metrics[2:4] = count_correct(model, test_loader, device)
        check_metrics(args, epoch, metrics)
        seconds = time.perf_counter() - start
        report(args, epoch, metrics, seconds)
        save_checkpoint(args, model, optimizer, epoch)


if __name__ == "__main__":
    main()
