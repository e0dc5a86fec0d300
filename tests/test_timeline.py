"""The tool that draws a step: what it measures on real processes, and what it draws of made-up times."""

import sys
import time
from types import SimpleNamespace

import pytest

from tests.processes import run_command, run_ranks
from tests.timeline import draw, measure


def clocked(rank, bucket_cap_mb, batch_size):
    """A measured step of the small network, between two readings of the clock of the machine, in milliseconds."""
    before = time.time_ns() / 1e6
    step = measure(rank, SimpleNamespace(model="cnn", batch_size=batch_size, bucket_cap_mb=bucket_cap_mb))
    assert before < step["forward"][0] < step["optimizer"][1] < time.time_ns() / 1e6
    assert sum(step["buckets"]) == pytest.approx(58634 * 4 / 2**20, rel=1e-6)  # parameters of 4 bytes
    assert len(step["buckets"]) == len(step["all-reduces"])
    assert step["forward"][1] <= step["backward"][0] and step["all-reduces"][-1][0] < step["optimizer"][0]
    return step


def test_with_several_buckets_the_first_all_reduce_begins_before_backward_ends(tmp_path):
    """The batch makes backward long against the start of a thread; the first bucket is full at once."""
    for step in run_ranks(tmp_path, clocked, 0.01, 480):
        assert len(step["all-reduces"]) > 2
        assert step["backward"][0] < step["all-reduces"][0][0] < step["backward"][1]


def test_with_one_huge_bucket_the_all_reduce_begins_after_the_last_gradient(tmp_path):
    steps = run_ranks(tmp_path, clocked, 1000, 48)
    [first], [second] = (step["all-reduces"] for step in steps)
    assert first[0] < second[1] and second[0] < first[1]  # of one clock: it ends nowhere before it has begun everywhere
    for step in steps:
        assert step["all-reduces"][0][0] >= step["backward"][1]


def test_each_bar_is_drawn_at_its_place():
    """57 columns for 57 milliseconds; what is too short to see takes one; rank 1 is 2 behind."""
    times = {"forward": (5, 15), "backward": (15, 35), "all-reduces": [(20, 25), (30, 45)], "optimizer": (47, 62)}
    late = {"forward": (7, 17), "backward": (17, 37), "all-reduces": [(36.2, 36.4)], "optimizer": (45, 46)}
    lines = draw("title", [times, late]).splitlines()
    assert lines[1].split() == ["0", "ms", "57.0", "ms"]
    assert lines[2:11] == [
        f"{label:22}|{' ' * start}{bar}"
        for label, start, bar in (
            ("rank 0  forward", 0, "#" * 10),
            ("        backward", 10, "#" * 20 + "." * 10),
            ("        all-reduce 1", 15, "=" * 5),
            ("        all-reduce 2", 25, "=" * 15),
            ("        optimizer", 42, "#" * 15),
            ("rank 1  forward", 2, "#" * 10),
            ("        backward", 12, "#" * 20),
            ("        all-reduce 1", 31, "="),
            ("        optimizer", 40, "#"),
        )
    ]


def test_the_command_draws_every_rank():
    result = run_command(sys.executable, "tests/timeline.py", "--model", "cnn")
    lines = result.stdout.splitlines()
    assert (result.returncode, result.stderr) == (0, "")
    assert lines[0].startswith("cnn, 2 processes, global batch 48, buckets of ")
    assert [line[:15] for line in lines if "forward" in line] == ["rank 0  forward", "rank 1  forward"]
