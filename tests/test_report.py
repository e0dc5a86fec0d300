"""What a run prints, and counts for it: true figures, on a terminal a sign of life, and nothing that ends training."""

import io
import os
import sys
from types import SimpleNamespace

import pytest
import torch

from common import report
from common.model import count_correct


def test_the_line_of_an_epoch_says_what_was_measured(capsys):
    """Over 8,000 training and 4 test images, in 2 seconds, in the third of ten epochs."""
    report.report_epoch(torch.tensor([4000.0, 8000, 3, 4]), 2, 10, 2.0)
    assert capsys.readouterr().out == "epoch  3/10  loss 0.500000  test accuracy 75.00%  4,000 images/s  eta 14 s\n"


def test_evaluation_counts_learns_nothing_and_leaves_each_layer_in_the_mode_in_which_it_was():
    """A BatchNorm that was frozen does not thaw, and none learns from test images."""
    model, gradients = torch.nn.Sequential(torch.nn.BatchNorm1d(2).eval(), torch.nn.BatchNorm1d(2)), []
    model.register_forward_hook(lambda *_: gradients.append(torch.is_grad_enabled()))
    images, labels = torch.tensor([[1.0, 0], [0, 1], [0, 1]]), torch.tensor([0, 1, 0])
    counts = count_correct(model, [(images, labels)] * 2, "cpu")
    assert (counts.tolist(), counts.dtype, gradients) == ([4, 6], torch.float64, [False] * 2)
    assert [layer.training for layer in (model, *model)] == [True, False, True]
    assert not any(layer.running_mean.any() for layer in model)


@pytest.mark.parametrize(("rank", "terminal"), [(0, True), (0, False), (1, True)])
def test_progress_is_shown_by_rank_0_on_a_terminal_at_most_twice_a_second(rank, terminal, monkeypatch):
    """10 batches of 12 images in each of 2 processes, one each 0.2 s, in the third of ten epochs."""
    clock, stdout = [0.0], io.StringIO()
    stdout.isatty = lambda: terminal
    monkeypatch.setattr(sys, "stdout", stdout)
    monkeypatch.setattr(report, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr(report, "rank", rank), monkeypatch.setattr(report, "world_size", 2)
    for _ in report.show_progress([(None, range(12))] * 10, 2, 10):
        clock[0] += 0.2
    rates = [f"\x1b[Kepoch  3/10   {n}0%  120 images/s  eta {eta} s\r" for n, eta in [(3, 15), (6, 15), (9, 14)]]
    assert stdout.getvalue() == ("".join(rates) if (rank, terminal) == (0, True) else "")
    report.report_epoch(torch.tensor([1, 240, 3, 4]), 2, 10, clock[0])
    line = stdout.getvalue()[:-1].split("\r")[-1]
    assert len(line) > max(map(len, rates)) - len("\x1b[K\r"), "it covers what it is written over"


def pipe_without_a_reader():
    reader, writer = os.pipe()
    os.close(reader)
    return writer


@pytest.mark.parametrize("path", ["/dev/full", pipe_without_a_reader, os.devnull])
def test_what_cannot_be_printed_does_not_end_a_run(path, monkeypatch):
    with open(path() if callable(path) else path, "w", encoding="ascii") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        report.print_line("saved in ö.pt"), report.print_line("again")
