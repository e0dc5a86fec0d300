"""The tool that draws a step: what it measures on real processes, and what it draws of made-up times."""

import json
import random
import sys
import time
import xml.etree.ElementTree
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType

from tests.processes import run_ranks
from tests.test_commands import run
from tests.timeline import WIDTH, draw, draw_svg, hidden_share, measure, on_one_axis, parse, read, sentences

CPU = torch.device("cpu")


def step(forward=(0, 10), backward=(10, 30), exchanges=((15, 20), (25, 40)), optimizer=(42, 57)):
    """A step of one rank, in milliseconds: of 20 in which an exchange runs, 5 + 5 lie within backward."""
    return {"forward": forward, "backward": backward, "exchanges": exchanges, "optimizer": optimizer}


def measured(folder, bucket_cap_mb, batch_size):
    """Of each rank the measured step of the small network; its gradients are 0.22 MiB."""
    options = {"model": "cnn", "batch_size": batch_size, "world_size": 2, "bucket_cap_mb": bucket_cap_mb}
    return run_ranks(folder, clocked, SimpleNamespace(**options, chrome=None))


def clocked(rank, args):
    """A measured step, between two readings of the clock of the machine, in milliseconds."""
    before = time.time_ns() / 1e6
    result = measure(rank, args, CPU)
    return result | {"clock": [before, time.time_ns() / 1e6]}


@pytest.fixture(scope="module")
def small_buckets(tmp_path_factory):
    """The batch makes backward long against the start of a thread; the first bucket is full at once."""
    return measured(tmp_path_factory.mktemp("small"), 0.01, 480)


@pytest.fixture(scope="module")
def one_bucket(tmp_path_factory):
    return measured(tmp_path_factory.mktemp("one"), 1000, 48)


def test_with_several_buckets_the_first_exchange_begins_before_backward_ends_and_part_is_hidden(small_buckets):
    for rank in small_buckets:
        assert len(rank["exchanges"]) == len(rank["buckets"]) > 2
        assert rank["backward"][0] < rank["exchanges"][0][0] < rank["backward"][1]
        assert 0 < hidden_share(rank["exchanges"], rank["backward"]) < 1


def test_with_one_huge_bucket_the_exchange_begins_after_the_last_gradient_and_nothing_is_hidden(one_bucket):
    for rank in one_bucket:
        assert len(rank["exchanges"]) == len(rank["buckets"]) == 1
        assert rank["exchanges"][0][0] >= rank["backward"][1]
        assert hidden_share(rank["exchanges"], rank["backward"]) == 0


def test_the_optimizer_steps_when_every_exchange_has_begun(small_buckets, one_bucket):
    """And ended, but the thread of gloo may note the end after it has let the main thread go on."""
    for rank in small_buckets + one_bucket:
        assert rank["forward"][1] <= rank["backward"][0]
        assert max(start for start, _ in rank["exchanges"]) < rank["optimizer"][0] < rank["optimizer"][1]


def test_the_buckets_hold_the_whole_model(small_buckets, one_bucket):
    for rank in small_buckets + one_bucket:
        assert sum(rank["buckets"]) == pytest.approx(58634 * 4 / 2**20, rel=1e-6)  # parameters of 4 bytes


def test_the_times_of_all_ranks_are_of_one_clock(small_buckets, one_bucket):
    """The clock of the machine; and an exchange ends on no rank before it has begun on the other."""
    for rank in small_buckets + one_bucket:
        assert rank["clock"][0] < rank["forward"][0] < rank["optimizer"][1] < rank["clock"][1]
    [(first_start, first_end)], [(second_start, second_end)] = (rank["exchanges"] for rank in one_bucket)
    assert first_start < second_end and second_start < first_end


def test_the_first_of_the_ranks_to_begin_begins_at_0():
    late = step((7, 17), (17, 37), [(22, 27)], (49, 64))
    assert on_one_axis([late, step((5, 15), (15, 35), [(20, 25)], (47, 62))]) == [
        step((2, 12), (12, 32), ((17, 22),), (44, 59)), step((0, 10), (10, 30), ((15, 20),), (42, 57)),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("exchanges", "share"),
    [
        ([(12, 18)], 1),  # within
        ([(30, 40)], 0),  # after
        ([(25, 40)], 5 / 15),
        ([(5, 35)], 20 / 30),  # longer than backward
        ([(15, 20), (25, 40)], 10 / 20),
        ([(15, 35), (20, 25), (25, 40)], 15 / 25),  # at the same time: what two fill counts once
    ],
)
def test_the_hidden_share_is_the_one_computed_by_hand(exchanges, share):
    assert hidden_share(exchanges, (10, 30)) == pytest.approx(share)


def test_the_hidden_share_is_the_one_counted_millisecond_by_millisecond():
    chance = random.Random(0)
    for _ in range(200):
        exchanges = [(start, start + chance.randint(1, 30)) for start in chance.choices(range(100), k=5)]
        backward = (20, chance.randint(21, 100))
        filled = set().union(*(range(*times) for times in exchanges))
        assert hidden_share(exchanges, backward) == pytest.approx(len(filled & set(range(*backward))) / len(filled))


def test_the_sentence_says_when_the_exchange_began_and_what_is_hidden():
    """5 of the 20 milliseconds of backward; with one bucket not before the end."""
    late = step(exchanges=[(30.1, 40)])
    assert list(sentences([step(), late])) == [
        "rank 0: the first exchange began after 25% of backward, which hides 50% of the communication",
        "rank 1: the first exchange began after 100% of backward, which hides 0% of the communication",
    ]


def test_each_bar_is_drawn_at_its_place():
    """57 columns for 57 milliseconds; what is too short to see takes one; rank 1 is 2 behind."""
    late = step((2, 12), (12, 32), [(31.2, 31.4)], (40, 41))
    lines = draw(["title"], [step(), late]).splitlines()
    assert [line[:22].split("|")[0].rstrip() for line in lines[3:12]] == [
        "rank 0  forward", "        backward", "        all-reduce 1", "        all-reduce 2", "        optimizer",
        "rank 1  forward", "        backward", "        all-reduce 1", "        optimizer",
    ]  # fmt: skip
    assert [line.split("|")[1] for line in lines[3:12]] == [
        f"{bar:57}"
        for bar in (
            "#" * 10,
            " " * 10 + "#" * 20 + "." * 10,
            " " * 15 + "=" * 5,
            " " * 25 + "=" * 15,
            " " * 42 + "#" * 15,
            " " * 2 + "#" * 10,
            " " * 12 + "#" * 20,
            " " * 31 + "=",
            " " * 40 + "#",
        )
    ]
    assert lines[6].endswith("|   25.0 to    40.0") and lines[2].split() == ["0", "ms", "57.0", "ms"]


def test_the_drawing_is_narrow_however_long_the_step():
    long_step = step((0, 3e4), (3e4, 6e4), [(6e4, 9e4)] * 12, (9e4, 99999))
    lines = draw(["title"], [long_step] * 11).splitlines()
    assert len(lines) > 11 * 15 and max(map(len, lines)) <= WIDTH == 100
    assert len({line.index("|") for line in lines if "|" in line}) == 1


def test_the_svg_draws_the_same_bars_and_knows_light_and_dark():
    """600 units for 60 milliseconds, from 180 on."""
    text = draw_svg(["title"], [step(optimizer=(42, 60))])
    root = xml.etree.ElementTree.fromstring(text)
    assert root.tag == "{http://www.w3.org/2000/svg}svg" and "prefers-color-scheme: dark" in text
    kinds = ("computes", "waits", "exchanges")
    bars = [each for each in root.iter("{http://www.w3.org/2000/svg}rect") if each.get("class") in kinds]
    assert [(each.get("class"), float(each.get("x")), float(each.get("width"))) for each in bars[:6]] == [
        ("computes", 180, 100), ("computes", 280, 200), ("waits", 480, 100),
        ("exchanges", 330, 50), ("exchanges", 430, 150), ("computes", 600, 180),
    ]  # fmt: skip
    words = [each.text for each in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"title", "rank 0", "backward", "all-reduce 2", *sentences([step()])} <= set(words)


def event(name, start, end, device=DeviceType.CPU, kind="cpu_op", number=0, cause=0):
    times = SimpleNamespace(start=start, end=end)
    facts = {"device_type": device, "activity_type": kind, "id": number, "linked_correlation_id": cause}
    return SimpleNamespace(name=name, time_range=times, **facts)


def kernel(name, start, end, cause=0, kind="kernel"):
    return event(name, start, end, DeviceType.CUDA, kind, cause=cause)


def test_on_a_gpu_the_bars_are_the_kernels_that_each_part_has_launched():
    """The host runs ahead; the last copy out of a bucket is no computation of backward, an annotation is no kernel."""
    host = [("forward", 0, 10), ("backward", 10, 30), ("optimizer", 30, 40)]
    launches = [("aten::conv", 1), ("ConvolutionBackward0", 12), ("aten::copy_", 28), ("aten::add", 35)]
    events = [event(*times) for times in host]
    events += [event(name, start, start + 2, number=number) for number, (name, start) in enumerate(launches, 1)]
    events += [kernel("conv", 5000, 9000, 1), kernel("conv_grad", 9000, 20000, 2), kernel("copy", 30000, 31000, 3)]
    events += [kernel("add", 31000, 32000, 4), kernel("nccl:all_reduce", 15000, 30000, kind="gpu_user_annotation")]
    events += [kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL", *times) for times in [(20000, 30000), (15000, 18000)]]
    events += [kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 2, 8)]  # of the barrier
    assert read(events, 100) == {
        "forward": [105, 109],
        "backward": [109, 120],
        "optimizer": [131, 132],
        "exchanges": [[115, 118], [120, 130]],
    }


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--nproc", 1], "one process has nothing to exchange; use --nproc 2 or more"),
        (["--nproc", 3, "--batch-size", 50], "--batch-size 50 does not divide among 3 processes; 48 and 51 do"),
        (["--batch-size", "many"], "argument --batch-size: invalid whole number from 1 up value: 'many'"),
        (["--bucket-cap-mb", 0], "--bucket-cap-mb 0.0 is not a size; use a number above 0, such as 25"),
        *[(["--bucket-cap-mb", size], f"--bucket-cap-mb {size} is not a size") for size in ("nan", "inf", "1e+300")],
        (["--svg", "missing/a.svg"], "--svg missing/a.svg cannot be written; name a file in a folder that exists"),
        (["--svg", "."], "--svg . cannot be written"),
        (["--chrome", __file__], f"--chrome {__file__} cannot be made (File exists); choose another folder"),
        (["--epochs", 3], "unrecognized arguments: --epochs 3"),
    ],
)
def test_an_error_of_a_person_is_one_line_and_status_2(options, said, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        parse([*map(str, options)])
    [line] = capsys.readouterr().err.splitlines()
    assert end.value.code == 2 and line.startswith(said) and not list(tmp_path.iterdir())


def test_the_command_prints_the_rows_of_every_rank_and_writes_what_was_asked_for(tmp_path):
    tool, traces = [sys.executable, "tests/timeline.py", "--model", "cnn"], tmp_path / "new" / "traces"
    result = run(tool, "--svg", tmp_path / "step.svg", "--chrome", traces)
    assert result.returncode == 0 and result.stderr == ""
    lines = result.stdout.splitlines()
    assert lines[0] == "one step of cnn, 2 processes on CPU, global batch 48"
    assert lines[1].startswith("gradients in buckets of ") and max(map(len, lines)) <= WIDTH
    for rank in range(2):
        assert sum(line.startswith(f"rank {rank}  forward") for line in lines) == 1
        assert lines[rank - 2].startswith(f"rank {rank}: the first exchange began after ")
    for label in "backward", "all-reduce 1", "all-reduce 2", "optimizer":
        assert sum(line[:22].rstrip() == f"{'':8}{label}" for line in lines) == 2

    svg = xml.etree.ElementTree.parse(tmp_path / "step.svg")
    assert lines[-1] in [each.text for each in svg.iter("{http://www.w3.org/2000/svg}text")]
    assert sorted(path.name for path in traces.iterdir()) == ["rank0.json", "rank1.json"]
    for path in traces.iterdir():
        events = json.loads(path.read_text())["traceEvents"]
        assert {"forward", "backward", "gloo:all_reduce", "optimizer"} <= {each["name"] for each in events}
