"""What a person can do wrong on the command line: one line that says what to type instead, once, and status 2."""

import os
import sys
import time
from pathlib import Path

import pytest
import torch

from common import checkpoint, options, report, spawn, torchrun
from tests.processes import SCRIPTS, TORCHRUN, edited, run_command, run_script, torchrun_variables

START = "start this script with torchrun: torchrun --standalone --nproc_per_node=2 "
QUOTA, PERIOD = "cpu.cfs_quota_us", "cpu.cfs_period_us"
HELP = "; --help shows the options"


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """No launcher has started this process, and what parse_args sets is put back."""
    for name in [*torchrun_variables(0, 1, 1), "TORCHELASTIC_RUN_ID", "OMP_NUM_THREADS"]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(report, "rank", 0)
    monkeypatch.setattr(report, "world_size", 1)
    monkeypatch.setattr(checkpoint, "broadcast_object_list", list)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def line_of(capsys, parse_args, *argv):
    """The one line with which parse_args ends."""
    with pytest.raises(SystemExit) as ended:
        parse_args(list(argv))
    printed = capsys.readouterr()
    assert (ended.value.code, printed.out, printed.err.count("\n")) == (2, "", 1)
    return printed.err.removesuffix("\n")


def numbers(option, kind, *texts):
    return [([f"{option}={text}"], f"argument {option}: invalid {kind} value: '{text}'{HELP}") for text in texts]


WRONG = [
    *numbers("--epochs", "whole number from 1 up", "0", "1.5", "nan", ""),
    *numbers("--batch-size", "whole number from 1 up", "0", "-48", 10**30),
    *numbers("--seed", "whole number from 0 up", "-1", "dice", 2**63 - 1),
    *numbers("--lr", "number above 0", "0", "fast", "nan", "inf", "1e30"),
    (["--fast"], f"unrecognized arguments: --fast{HELP}"),
    (["--epoch", "3"], f"unrecognized arguments: --epoch 3{HELP}"),
    (["--nproc", "2"], f"unrecognized arguments: --nproc 2{HELP}"),
    (["fast"], f"unrecognized arguments: fast{HELP}"),
    (["--seed", "--epochs", "1"], f"argument --seed: expected one argument{HELP}"),
]


@pytest.mark.parametrize("argv, line", WRONG, ids=[" ".join(argv) for argv, _ in WRONG])
def test_an_option_that_makes_no_sense_is_named(argv, line, capsys):
    assert line_of(capsys, options.parse_args, *argv) == line


def test_an_unknown_name_is_answered_with_those_there_are(capsys):
    for option, names in ("--dataset", ["digits", "fashion-mnist", "cifar10"]), ("--model", ["cnn", "resnet18"]):
        line = line_of(capsys, options.parse_args, option, "other")
        assert line.startswith(f"argument {option}: invalid choice: 'other'") and all(name in line for name in names)


@pytest.mark.parametrize("batch, nearest", [(50, "48 and 52"), (3, "4 and 8")])
def test_a_batch_that_does_not_divide_is_answered_with_the_nearest_that_do(batch, nearest, capsys):
    line = line_of(capsys, spawn.parse_args, "--batch-size", str(batch), "--nproc", "4")
    assert line == f"--batch-size {batch} does not divide among 4 processes; {nearest} do"
    assert line_of(capsys, spawn.parse_args, "--nproc=0").startswith("argument --nproc: invalid whole number from 1")


def test_a_tilde_is_the_home_in_every_path(monkeypatch):
    monkeypatch.setenv("HOME", "/home/of/somebody")
    args = options.parse_args(["--checkpoint=~/model.pt", "--data-root=~/data"])
    assert (args.checkpoint, args.data_root) == (Path("/home/of/somebody/model.pt"), Path("/home/of/somebody/data"))


# Once, however many processes run


def refused(tmp_path, script, *argv, nproc=4, seconds=60):
    """The one line with which a run ends, having printed no epoch and saved nothing."""
    (tmp_path / "empty").mkdir()
    argv = "--epochs", 1, "--checkpoint", tmp_path / "empty/model.pt", *argv
    run = run_script(tmp_path, script, *argv, nproc=nproc, seconds=seconds)
    assert (run.status, run.stderr.count("\n")) == (2, 1), run.stderr
    assert "epoch" not in run.stdout and list((tmp_path / "empty").iterdir()) == []
    return run.stderr


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize(
    "argv, line", [(["--lr", 0], "argument --lr"), (["--batch-size", 1440], "--batch-size 1440 exceeds the 1437")]
)
def test_each_script_says_it_once_and_touches_nothing(script, argv, line, tmp_path):
    assert refused(tmp_path, script, *argv).startswith(line)


def test_four_processes_say_it_once_even_if_rank_0_is_slow(tmp_path):
    late = "    import time; time.sleep(2 * (os.environ['RANK'] == '0'))\n"
    script = edited(tmp_path, "ddp_torchrun.py", ("def main(argv=None):\n", "def main(argv=None):\n" + late))
    assert "does not divide among 4" in refused(tmp_path, script, "--batch-size", 3)


def test_an_error_that_rank_0_has_not_met_is_printed_by_another_rank_after_a_while(monkeypatch, capsys):
    waited = []
    monkeypatch.setattr(time, "sleep", waited.append)
    monkeypatch.setattr(report, "rank", 1)
    with pytest.raises(SystemExit):
        report.exit_with_error("its disk\n is full")
    assert waited == [report.SECONDS_FOR_RANK_0] and capsys.readouterr().err == "its disk is full\n"


def test_a_batch_of_the_whole_training_set_is_allowed(tmp_path):
    assert run_script(tmp_path, "single_gpu.py", "--epochs", 1, "--batch-size", 1437).status == 0


def test_four_processes_print_the_help_once(tmp_path):
    run = run_script(tmp_path, "ddp_torchrun.py", "--help", nproc=4)
    assert (run.status, run.stderr, run.stdout.count("usage:"), run.stdout.count("(default: 48)")) == (0, "", 1, 1)


# Launchers


def test_python_alone_is_told_to_be_torchrun_but_shows_the_help(capsys, monkeypatch):
    result = run_command(sys.executable, "ddp_torchrun.py")
    assert (result.returncode, result.stdout, result.stderr) == (2, "", f"{START}ddp_torchrun.py\n")
    monkeypatch.setattr(sys, "argv", ["mine/my_train.py"])
    assert line_of(capsys, torchrun.parse_args) == f"{START}my_train.py"
    with pytest.raises(SystemExit) as shown:
        torchrun.parse_args(["--help"])
    assert shown.value.code == 0 and "--batch-size" in capsys.readouterr().out


@pytest.mark.parametrize("given", [{"RANK": "1"}, {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": ""}])
def test_variables_that_are_missing_are_named_at_once(given, monkeypatch, capsys):
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("it waits"))
    missing = [name for name in torchrun.VARIABLES if not given.get(name)]
    assert line_of(capsys, torchrun.parse_args).startswith(f"{', '.join(missing)} not set; {START}")


def test_torchrun_is_refused_by_a_script_that_would_train_in_each_of_its_processes_alone(monkeypatch, capsys):
    line = "torchrun's processes would each train alone; give it ddp_torchrun.py, or start this script with python"
    result = run_command(*TORCHRUN, "single_gpu.py")
    assert (result.returncode, result.stdout, result.stderr.count(f"{line}\n")) == (1, "", 1), result.stderr
    for name, value in {**torchrun_variables(0, 2, 1), "TORCHELASTIC_RUN_ID": "any"}.items():
        monkeypatch.setenv(name, value)
    assert line_of(capsys, spawn.parse_args) == line


def test_torchrun_passes_the_line_on_once_and_without_a_traceback_of_ours():
    result = run_command(*TORCHRUN, "ddp_torchrun.py", "--lr", "1e9", "--batch-size", "240")
    assert result.returncode == 1 and result.stderr.count("the loss of epoch 1 is nan; try an --lr below 1e+09") == 1
    assert 'ddp_torchrun.py", line' not in result.stderr


# More processes than GPUs: simulated, since where a GPU is present there may be many


@pytest.fixture
def two_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


def test_more_processes_than_gpus_are_refused_but_not_on_two_machines(two_gpus, monkeypatch, capsys):
    way_out = "start at most 2, or set CUDA_VISIBLE_DEVICES= (empty) to run on the CPU"
    line = line_of(capsys, spawn.parse_args, "--nproc", "3")
    assert line == f"3 processes need as many GPUs, this machine shows 2; {way_out}"
    monkeypatch.setattr(report, "world_size", 4)
    assert options.parse_args([], local_world_size=2)


def test_by_default_there_is_a_process_for_each_gpu_that_can_be_used(two_gpus, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    for usable, nproc in (True, 8), (False, 2):  # too new for the driver, they are counted all the same
        monkeypatch.setattr(torch.cuda, "is_available", lambda: usable)
        assert spawn.parse_args([]).nproc == nproc


# The cores


@pytest.fixture
def twelve_cores(monkeypatch):
    """Simulated, so that shares differ on every machine."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(12)), raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    monkeypatch.setattr(options, "_cgroup_limit", lambda: float("inf"))
    return monkeypatch


@pytest.mark.parametrize("processes, threads", [(1, 12), (2, 6), (8, 1), (12, 1), (16, 1)])
def test_each_process_gets_its_share_of_the_cores_and_at_least_one(twelve_cores, processes, threads):
    options.set_threads(processes)
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize(
    "chosen, threads", [("2", 2), ("7", 7), ("1", 1), ("0", 4), ("", 4), ("4,3", 4), ("9" * 11, 4)]
)
def test_a_chosen_number_of_threads_is_kept_and_what_is_no_number_is_not(twelve_cores, chosen, threads):
    twelve_cores.setenv("OMP_NUM_THREADS", chosen)
    options.set_threads(3)
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("processes, chosen, threads", [(3, "1", 4), (3, "2", 2), (1, "1", 1)])
def test_the_one_thread_that_torchrun_sets_is_no_choice(twelve_cores, processes, chosen, threads):
    for name, value in torchrun_variables(0, processes, 1).items():
        twelve_cores.setenv(name, value)
    twelve_cores.setenv("OMP_NUM_THREADS", chosen)
    torchrun.parse_args([])
    assert torch.get_num_threads() == threads


def test_what_python_3_13_says_and_a_container_allows_counts_too(twelve_cores):
    twelve_cores.setattr(os, "process_cpu_count", lambda: 5, raising=False)
    for limit, threads in (float("inf"), 5), (1.9, 1):
        twelve_cores.setattr(options, "_cgroup_limit", lambda limit=limit: limit)
        options.set_threads(1)
        assert torch.get_num_threads() == threads


@pytest.mark.parametrize(
    "group, files, limit",
    [
        ("0::/job/step", {"job/cpu.max": "150000 100000", "job/step/cpu.max": "max 100000"}, 1.5),
        ("0::/job/step", {"job/cpu.max": "300000 100000", "job/step/cpu.max": "100000 100000"}, 1),
        ("0::/", {"cpu.max": "max 100000"}, float("inf")),
        ("4:cpu,cpuacct:/docker/1", {f"cpu,cpuacct/{QUOTA}": "50000", f"cpu,cpuacct/{PERIOD}": "100000"}, 0.5),
        ("4:cpu:/", {f"cpu/{QUOTA}": "-1", f"cpu/{PERIOD}": "100000"}, float("inf")),
        ("7:memory:/\n0::/", {}, float("inf")),
    ],
)
def test_the_limit_of_a_container_counts_and_of_nested_ones_the_strictest(group, files, limit, tmp_path):
    files = {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    for name, text in [("proc/self/cgroup", group), *files.items()]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    assert options._cgroup_limit(tmp_path) == limit
