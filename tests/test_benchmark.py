"""The benchmark works and prints every row; no figure of it is judged here."""

import multiprocessing
import re
import sys
from types import SimpleNamespace

import pytest
import torch

from common.options import parse_args
from tests import benchmark
from tests.processes import ROOT, run_ranks
from tests.test_commands import run

COMMAND = [sys.executable, str(ROOT / "tests" / "benchmark.py"), "--quick", "--dataset", "digits", "--batch-size", "16"]
ROWS = [row for rows in benchmark.table(2).values() for row in rows]


@pytest.fixture(autouse=True)
def loads_nothing(monkeypatch):
    """The fork server of the other tests stays as they need it, without torchvision."""
    monkeypatch.setattr(benchmark.context, "set_forkserver_preload", lambda modules: None)


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    result = run(COMMAND, cwd=tmp_path_factory.mktemp("elsewhere"))
    assert result.returncode == 0, result.stderr
    return result


def test_one_command_prints_each_row_and_each_comparison_once(printed):
    lines = printed.stdout.splitlines()
    compared = 0
    for name, _, *comparisons in ROWS:
        [place] = [place for place, line in enumerate(lines) if line.startswith(f"{name}  ")]
        assert float(lines[place][26:35].replace(",", "")) > 0
        for line, (other, reason) in zip(lines[place:], comparisons):
            assert line.endswith(f"of {other}: {reason}" if other else reason)
            if other:
                ratio, low, high = re.fullmatch(r".* ([\d.e+-]+)  (\S+) to (\S+) +of .*", line).groups()
                assert 0 < float(low) <= float(ratio) <= float(high)
                compared += 1
    assert len(ROWS) >= 17 and compared >= 18
    assert len([line for line in lines if re.search(r"[\d.]+ to [\d.]+ +of ", line)]) == compared


@pytest.mark.parametrize("nproc", [1, 2, 3, 8])
def test_each_command_starts_as_many_processes_as_are_measured_with_options_that_they_take(nproc):
    """--quick, which runs above, starts one each."""
    for quick, started in (False, nproc), (True, 1):
        _, _, single, spawn, torchrun = [row[1].words for row in list(benchmark.table(nproc, quick).values())[-1]]
        assert parse_args(single[2:], 1, 1).epochs == 1
        assert parse_args(spawn[2:], world_size=None).world_size == started
        assert f"--nproc_per_node={started}" in torchrun
        parse_args(torchrun[torchrun.index("ddp_torchrun.py") + 1 :], started, started)


def test_the_first_lines_say_what_was_measured_on_what(printed):
    first, second = printed.stdout.splitlines()[:2]
    assert re.match(r"\d+ cores? of .+; torch \d", first)
    assert "cnn: 58,634 parameters; 320 images of 1x8x8; global batch 16; N = 2 with" in second
    assert second.endswith("1 round")


def test_on_stderr_one_line_that_is_written_again_says_what_runs_and_how_long_it_takes(printed):
    texts = [text.strip() for text in printed.stderr.split("\n") if text.strip()]  # "\r" is read as "\n"
    matches = [re.fullmatch(r"start: .+|round 1 of 1, about \d+ s left: (.+)", text) for text in texts]
    assert all(matches)
    assert sorted(match[1] for match in matches if match[1]) == sorted(name for name, *_ in ROWS)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--batch-size", "7"], "--batch-size 7 does not divide among 2 processes; 6 and 8 do"),
        (["--dataset", "digits", "--batch-size", "1438"], "--batch-size 1438 is more than the 1437 images"),
        (["--rounds", "0"], "--rounds 0 measures nothing"),
        (["--nproc", "0"], "argument --nproc: invalid whole number from 1 up value: '0'"),
        (["--model", "vgg"], "argument --model: invalid choice: 'vgg'"),
        (["--slow"], "unrecognized arguments: --slow"),
    ],
)
def test_an_option_that_cannot_be_is_refused_in_one_line(options, reason, capfd):
    with pytest.raises(SystemExit) as end:
        benchmark.main(options)
    stdout, stderr = capfd.readouterr()
    assert end.value.code == 2 and stdout == "" and reason in stderr and stderr.count("\n") == 1


class Measured:
    """A row whose chunks lose these shares of the cores, one after the other; its values count them."""

    def __init__(self, *lost):
        self.lost, self.runs = lost, 0

    def run(self):
        self.runs += 1
        return self.runs, self.lost[self.runs - 1]


@pytest.fixture
def losing(monkeypatch):
    monkeypatch.setattr(benchmark, "watched", lambda run: run())
    monkeypatch.setattr(benchmark, "wait_for_quiet", lambda: None)
    return lambda **rows: benchmark.measure(rows, benchmark.parse(["--rounds", "1"]))


def test_a_chunk_that_others_disturbed_is_repeated_and_an_undisturbed_one_is_not(losing):
    samples, fates = losing(quiet=Measured(0.01), noisy=Measured(0.5, 0.3, 0.01))
    assert samples == {"quiet": [1], "noisy": [3]}
    assert fates == {"all": 2, "repeated": 2, "disturbed": 0}


def test_the_repeats_come_to_an_end_and_the_least_disturbed_chunk_is_kept(losing):
    samples, fates = losing(noisy=Measured(0.5, 0.2, 0.3))
    assert samples == {"noisy": [2]}
    assert fates == {"all": 1, "repeated": 2, "disturbed": 1}


def test_commands_are_measured_in_every_fourth_round(losing):
    samples, _ = benchmark.measure({"command": Measured(0, 0)}, benchmark.parse(["--rounds", "5"]))
    assert samples == {"command": [1, 2]}


def test_the_table_shows_the_median_and_the_quartiles_of_the_ratios():
    assert benchmark.compared([2, 40, 24], [1, 10, 3]) == ("4", "3 to 6")


def test_of_the_processes_of_a_loop_the_slowest_counts_and_each_is_asked_for_the_same_steps():
    """Two, of which a chunk of 4 steps with 6 images takes 0.2 and 0.3 seconds; a chunk of 0.8 has 11."""
    orders, loop = [], benchmark.Loop(None, many=True)
    for report in (0.2, 1.0, 3 << 20), (0.3, 1.5, 5 << 20):
        calls = {"poll": lambda seconds: True, "send": orders.append, "recv": lambda report=report: report}
        loop.connections.append(SimpleNamespace(**calls))
    loop.steps, loop.batch = 4, 6
    assert loop.run() == (pytest.approx(4 * 6 / 0.3), 2.5) and loop.mebibytes == 5
    assert orders == [(1, 4)] * 2
    loop.calibrate()
    assert loop.steps == 11


def test_a_command_that_fails_has_no_time():
    with pytest.raises(ChildProcessError, match="no such thing"):
        benchmark.Command("-c", "exit('no such thing')").run()


def test_the_cores_work_for_programs_the_system_and_interrupts_and_in_no_idle_time(monkeypatch):
    """The columns of /proc/stat: user, nice, system, idle, iowait, irq, softirq, steal, guest, guest_nice."""
    text = "cpu 9 9 9 9 9 9 9 9 9 9\ncpu0 1 2 4 1000 2000 8 16 32 4000 8000\ncpu1 9 9 9 9 9 9 9 9 9 9\nintr 7\n"
    monkeypatch.setattr(benchmark, "CORES", ["cpu0"])
    monkeypatch.setattr(benchmark.Path, "read_text", lambda path: text)
    monkeypatch.setattr(benchmark.os, "sysconf", {"SC_CLK_TCK": 10}.get)
    assert benchmark.busy() == 6.3


def test_before_a_repeat_the_others_are_waited_for_but_not_for_ever(monkeypatch):
    monkeypatch.setattr(benchmark, "CORES", ["cpu0"])
    for share, waited in (0.5, 2), (0.01, 0.25):
        now = [0.0]
        monkeypatch.setattr(benchmark, "busy", lambda: now[0] * share)
        for clock in "monotonic", "perf_counter":
            monkeypatch.setattr(benchmark.time, clock, lambda: now[0])
        monkeypatch.setattr(benchmark.time, "sleep", lambda seconds: now.append(now.pop() + 0.25))
        benchmark.wait_for_quiet()
        assert now[0] == waited


def averaged(rank, reduce):
    """Two gradients after the reduction by hand, of which rank r had r + 1 times as much."""
    gradients = [torch.ones(2, 3) * (rank + 1), torch.arange(4.0) * (rank + 1)]
    reduce(gradients)
    return gradients


@pytest.mark.parametrize("reduce", [benchmark.one_call, benchmark.a_call_each])
def test_a_reduction_by_hand_leaves_the_mean_on_every_rank(reduce, tmp_path):
    for gradients in run_ranks(tmp_path, averaged, reduce):
        torch.testing.assert_close(gradients, [torch.full((2, 3), 1.5), torch.arange(4.0) * 1.5])


def test_what_others_took_is_the_work_of_the_cores_that_is_not_ours(monkeypatch):
    """In 2 seconds 3 cores worked 4 seconds, of which 2.5 are ours: of the 6 that there were others took 1.5."""
    monkeypatch.setattr(benchmark, "CORES", ["cpu0", "cpu1", "cpu2"])
    monkeypatch.setattr(benchmark, "busy", iter([10.0, 14.0]).__next__)
    monkeypatch.setattr(benchmark.time, "perf_counter", iter([100.0, 102.0]).__next__)
    assert benchmark.watched(lambda: ("value", 2.5)) == ("value", 1.5 / 6)


def test_a_chunk_times_the_steps_that_were_asked_for_and_not_the_one_before_them(monkeypatch):
    """Each step takes one second here, so the seconds count the steps."""
    reports, orders = [], iter([(1, 3), (1, 2), (1, 2)])
    clock = benchmark.chunks(SimpleNamespace(send=reports.append, recv=lambda: next(orders)), cuda=False)
    now = 0
    monkeypatch.setattr(benchmark.time, "perf_counter", lambda: now)
    for now in range(1 + 3 + 1 + 2 + 1):
        next(clock)
    assert reports[0] is None and [seconds for seconds, _, _ in reports[1:]] == [3, 2]


def crash(job):
    raise MemoryError(f"{job.share} of {len(job.images)}")


def test_a_loop_that_cannot_run_ends_the_benchmark_in_one_line_and_leaves_no_process(monkeypatch, capfd):
    before = multiprocessing.active_children()
    monkeypatch.setattr(benchmark, "table", lambda *_: {"Training": [("bare loop", benchmark.Loop(crash, True))]})
    with pytest.raises(SystemExit) as end:
        benchmark.main(["--quick"])
    assert end.value.code == 2
    assert capfd.readouterr().err.split("\r")[-1] == "bare loop ended with an error: MemoryError: 64 of 2560\n"
    assert multiprocessing.active_children() == before
