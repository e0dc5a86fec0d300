"""Train on one device, a GPU or the CPU: python single_gpu.py"""

import time

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, RandomSampler

from common.checkpoint import load_checkpoint, save_checkpoint
from common.data import load_data
from common.model import build_model, count_correct
from common.options import parse_args
from common.report import check_loss, report_epoch, report_start, show_progress


def main(argv=None):
    args = parse_args(argv)
    train(args)


def train(args):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    torch.manual_seed(args.seed)
    train_set, test_set = load_data(args.dataset, args.data_root)

    sampler = RandomSampler(train_set, generator=torch.Generator())
    train_loader = DataLoader(train_set, args.batch_size, sampler=sampler, drop_last=True)
    test_loader = DataLoader(test_set, args.batch_size)

    model = build_model(args.model, train_set).to(device)
    report_start(device, args.batch_size, train_set, test_set, model)
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9)
    first_epoch = load_checkpoint(args.checkpoint, vars(args), model=model, optimizer=optimizer)

    for epoch in range(first_epoch, args.epochs):
        # Without this a resumed run would shuffle differently from one that was never stopped.
        sampler.generator.manual_seed(args.seed + epoch)
        totals = torch.zeros(4, dtype=torch.float64, device=device)
        start = time.perf_counter()

        for images, labels in show_progress(train_loader, epoch, args.epochs):
            images, labels = images.to(device), labels.to(device)
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            totals[0] += loss.detach() * len(labels)
            totals[1] += len(labels)

        totals[2:] = count_correct(model, test_loader, device)
        check_loss(totals, epoch, args.lr)
        seconds = time.perf_counter() - start
        report_epoch(totals, epoch, args.epochs, seconds)
        save_checkpoint(args.checkpoint, vars(args), epoch, model=model, optimizer=optimizer)


if __name__ == "__main__":
    main()
