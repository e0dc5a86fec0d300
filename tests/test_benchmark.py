"""The benchmark: its rows are what they say, its figures are those of the runs, and it prints all of them."""

import re
from types import SimpleNamespace

import pytest

from tests import benchmark
from tests.processes import edited, run_script


def test_the_table_shows_the_median_and_the_quartiles_of_the_ratios():
    assert benchmark.compared([2, 40, 24], [1, 10, 3]) == "4.00 [3.00, 6.00]"


def test_the_speed_of_a_row_is_that_of_its_second_epoch(monkeypatch):
    stdout = "48 images\nepoch 1/2 loss 2 1,000 images/s eta 1 s\nepoch 2/2 loss 1 2,345 images/s eta 0 s\n"
    monkeypatch.setattr(benchmark, "run_script", lambda *_, **__: SimpleNamespace(status=0, stdout=stdout))
    assert benchmark.run_row("single_gpu.py", 48, 1, []) == 2345


def test_an_all_reduce_a_parameter_trains_as_the_wrapper_and_without_communication_ranks_differ(tmp_path):
    weights = {}
    for name, (script, edits, *_) in list(benchmark.ROWS.items())[1:4]:
        run = run_script(tmp_path, edited(tmp_path, script, *edits), "--epochs", 1, nproc=2)
        weights[name] = {rank[0] for rank in run.weights}
    assert weights["an all-reduce a parameter"] == weights["ddp_torchrun.py"] and len(weights["ddp_torchrun.py"]) == 1
    assert len(weights["no communication"]) == 2


def test_every_row_is_printed_with_its_ratio(monkeypatch, capfd):
    monkeypatch.setattr(benchmark.importlib.util, "find_spec", lambda name: None)  # no framework
    benchmark.main(["--rounds", "1", "--images", "64", "--batch-size", "16"])
    first, *rows = capfd.readouterr().out.splitlines()
    assert re.fullmatch(r"\d+ .+; cnn; 64 images of 28x28; global batch 16; N = 2; 1 rounds", first)
    for row, (name, (_, _, against, meaning)) in zip(rows[2:], list(benchmark.ROWS.items())[:4], strict=True):
        ratio = rf"(\d\.\d\d) \[\1, \1\] of {against}: " if against else ""  # one round: three times the same
        assert re.fullmatch(rf"{name} +[\d,]+  {ratio}{re.escape(meaning)}", row)


def test_a_row_that_fails_ends_the_benchmark_with_one_line(capfd):
    with pytest.raises(SystemExit) as exit:
        benchmark.main(["--rounds", "1", "--images", "64", "--batch-size", "66"])
    assert exit.value.code == 2
    [line] = capfd.readouterr().err.splitlines()
    assert re.fullmatch(r".+ ended with: --batch-size 66 exceeds the 64 training images; .+", line)
