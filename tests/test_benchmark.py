"""The benchmark: its figures are what it says, and it prints every row; no figure of this machine is judged."""

import re
from types import SimpleNamespace

import pytest
import torch

from tests import benchmark
from tests.processes import run_ranks


def test_the_table_shows_the_median_and_the_quartiles_of_the_ratios():
    assert benchmark.compared([2, 40, 24], [1, 10, 3]) == "4.00 [3.00, 6.00]"


def test_a_chunk_times_the_steps_that_were_asked_for_and_not_the_one_before_them(monkeypatch):
    """Each step takes one second here, so the seconds count the steps."""
    reports, orders, now = [], iter([3, 2, 2]), 0
    clock = benchmark.chunks(SimpleNamespace(send=reports.append, recv=lambda: next(orders)), lambda: None)
    monkeypatch.setattr(benchmark.time, "perf_counter", lambda: now)
    for now in range(1 + 3 + 1 + 2 + 1):
        next(clock)
    assert reports == [None, 3, 2]


def test_of_the_processes_of_a_loop_the_slowest_counts_and_each_is_asked_for_the_same_steps():
    """Two, of which a chunk of 4 steps with 6 images takes 0.2 and 0.3 seconds; one of 0.8 seconds has 11 steps."""
    orders, loop = [], benchmark.Loop("ddp_torchrun.py", SimpleNamespace(batch_size=6))
    loop.connections = [
        SimpleNamespace(poll=lambda seconds: True, send=orders.append, recv=lambda seconds=seconds: seconds)
        for seconds in (0.2, 0.3)
    ]
    loop.steps = 4
    assert loop.run() == pytest.approx(4 * 6 / 0.3) and orders == [4, 4]
    loop.calibrate(0.8)
    assert loop.steps == 11


def averaged(rank):
    gradients = [torch.ones(2, 3) * (rank + 1), torch.arange(4.0) * (rank + 1)]
    benchmark.average(gradients)
    return gradients


def test_the_all_reduce_by_hand_leaves_the_mean_on_every_rank(tmp_path):
    for gradients in run_ranks(tmp_path, averaged):
        torch.testing.assert_close(gradients, [torch.full((2, 3), 1.5), torch.arange(4.0) * 1.5])


def test_each_row_is_measured_in_each_round_and_printed_with_its_ratio(monkeypatch, capfd):
    names = [name for name in benchmark.LOOPS if name not in ("accelerate", "lightning_fabric")]
    monkeypatch.setattr(benchmark, "LOOPS", {name: benchmark.LOOPS[name] for name in names})
    benchmark.main(["--rounds", "2", "--seconds", "0.01", "--batch-size", "16"])
    first, *rows = capfd.readouterr().out.splitlines()
    assert re.fullmatch(r"\d+ .+; cnn; 60,000 images of 28x28; global batch 16; N = 2; 2 rounds of 0.01 s", first)
    for name, row in zip(names, rows[2:], strict=True):
        against, number = benchmark.LOOPS[name][2], r"[\d.]+"
        ratio = rf"{number} \[{number}, {number}\] of {against}: " if against else ""
        assert re.fullmatch(rf"{name} +[\d,]+  {ratio}{re.escape(benchmark.LOOPS[name][3])}", row)


def crash(job):
    raise MemoryError("planted")


def test_a_loop_that_cannot_run_ends_the_benchmark_with_one_line(monkeypatch, capfd):
    monkeypatch.setattr(benchmark, "LOOPS", {"bare loop": (crash, True, None, "")})
    with pytest.raises(SystemExit) as exit:
        benchmark.main(["--rounds", "1"])
    assert exit.value.code == 2
    assert capfd.readouterr().err.splitlines()[-1].startswith("bare loop ended with the error above; use another")
