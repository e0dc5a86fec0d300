"""What a person can get wrong: one line with the fact and the way out, exit status 2, and nothing written."""

import os
import subprocess
import sys
import time

import pytest
import torch

from common.options import parse_args
from tests.processes import ROOT, SCRIPTS, edited, run_ranks, run_script, torchrun_numbers

SPAWN, TORCHRUN = SCRIPTS[1:]
START = "start this script with torchrun: torchrun --standalone --nproc_per_node=2 ddp_torchrun.py"
every_script = pytest.mark.parametrize("script", SCRIPTS)
both_ddp_scripts = pytest.mark.parametrize("script", SCRIPTS[1:])


def refusal(tmp_path, script, *options, nproc=2, first=()):
    """Run a script, one epoch at most, that must end with status 2, print nothing but one line, and save nothing.

    Args:
        first (tuple of str): what may have been printed before, as starts of lines.
    Returns:
        str: the line.
    """
    (tmp_path / "empty").mkdir()
    options = "--epochs", 1, "--checkpoint", tmp_path / "empty/model.pt", *options
    run = run_script(tmp_path, script, *options, nproc=nproc, seconds=60)
    assert run.status == 2, run.stderr
    (line,) = run.stderr.splitlines()
    assert [text for text in run.stdout.splitlines() if not text.startswith(first)] == []
    assert list((tmp_path / "empty").iterdir()) == []
    return line


# The command line

WHOLE, ABOVE_0 = "whole number from {} up", "number above 0"
VALUES = [
    *[("--epochs", text, WHOLE.format(1)) for text in ["0", "1.5", "nan", ""]],
    *[("--batch-size", text, WHOLE.format(1)) for text in ["0", "-48", str(10**30)]],
    *[("--lr", text, ABOVE_0) for text in ["0", "fast", "nan", "inf", "1e30"]],
    *[("--seed", text, WHOLE.format(0)) for text in ["-1", "dice", str(2**63 - 1)]],
]
NAMES = {"--dataset": ["digits", "fashion-mnist", "cifar10"], "--model": ["cnn", "resnet18"]}
WORDS = {"unknown": ["--fast"], "abbreviated": ["--epoch", "3"], "positional": ["fast"]}


@every_script
@pytest.mark.parametrize("option, text, expected", VALUES, ids=[f"{option}={text}" for option, text, _ in VALUES])
def test_a_number_that_makes_no_sense_is_refused(tmp_path, script, option, text, expected):
    line = refusal(tmp_path, script, f"{option}={text}")
    assert line == f"argument {option}: invalid {expected} value: {text!r}; --help shows the options"


def test_no_processes_at_all_are_refused(tmp_path):
    line = refusal(tmp_path, SPAWN, nproc=0)
    assert line == f"argument --nproc: invalid {WHOLE.format(1)} value: '0'; --help shows the options"


@every_script
@pytest.mark.parametrize("option, names", NAMES.items())
def test_an_unknown_name_is_refused_with_the_names_there_are(tmp_path, script, option, names):
    line = refusal(tmp_path, script, option, "other")
    assert line.startswith(f"argument {option}: invalid choice: 'other'")
    assert all(name in line for name in names)


@every_script
@pytest.mark.parametrize("words", WORDS.values(), ids=WORDS)
def test_a_word_that_is_no_option_is_refused(tmp_path, script, words):
    line = refusal(tmp_path, script, *words)
    assert line == f"unrecognized arguments: {' '.join(words)}; --help shows the options"


@every_script
def test_an_option_without_its_value_is_refused(tmp_path, script):
    line = refusal(tmp_path, script, "--seed", "--epochs", "1")
    assert line == "argument --seed: expected one argument; --help shows the options"


@pytest.mark.parametrize("script", ["single_gpu.py", TORCHRUN])
def test_only_the_script_that_starts_processes_knows_nproc(tmp_path, script):
    assert "unrecognized arguments: --nproc 2" in refusal(tmp_path, script, "--nproc", "2")


# The batch


@both_ddp_scripts
@pytest.mark.parametrize("batch, way_out", [(50, "48 and 52 do"), (3, "4 and 8 do")])
def test_a_batch_that_does_not_divide_is_refused_with_the_nearest_that_do(tmp_path, script, batch, way_out):
    line = refusal(tmp_path, script, "--batch-size", batch, nproc=4)
    assert line == f"--batch-size {batch} does not divide among 4 processes; {way_out}"


@every_script
@pytest.mark.parametrize("batch", [1440, 2**62])
def test_a_batch_larger_than_the_training_set_is_refused(tmp_path, script, batch):
    line = refusal(tmp_path, script, "--batch-size", batch, nproc=4)
    assert line.startswith(f"--batch-size {batch} is more than the 1437 training images")


def test_a_batch_of_the_whole_training_set_is_allowed(tmp_path):
    assert run_script(tmp_path, "single_gpu.py", "--epochs", 1, "--batch-size", 1437).status == 0


# The checkpoint


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The bytes of a checkpoint that a run left behind."""
    folder = tmp_path_factory.mktemp("saved")
    options = "--epochs", 1, "--checkpoint", folder / "model.pt"
    assert run_script(folder, TORCHRUN, *options, nproc=2).status == 0
    return (folder / "model.pt").read_bytes()


def refusal_of_file(tmp_path, script, *options):
    """As refusal(), with a checkpoint that is there, in tmp_path/checkpoint, and stays as it is, to the byte."""
    (file,) = (tmp_path / "checkpoint").iterdir()
    before = file.read_bytes()
    line = refusal(tmp_path, script, *options, "--checkpoint", file)
    assert list((tmp_path / "checkpoint").iterdir()) == [file] and file.read_bytes() == before
    assert line.startswith(f"{file} ")
    return line.removeprefix(f"{file} ")


@every_script
@pytest.mark.parametrize(
    "option, made_with, given",
    [("--batch-size", 48, 96), ("--lr", 0.02, 0.5), ("--seed", 0, 1), ("--model", "cnn", "resnet18")],
)
def test_a_checkpoint_made_with_another_setting_is_refused(tmp_path, saved, script, option, made_with, given):
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint/model.pt").write_bytes(saved)
    line = refusal_of_file(tmp_path, script, option, given)
    assert line.startswith(f"was made with {option} {made_with}, not {given}; use {option} {made_with}, or ")


@every_script
def test_a_checkpoint_made_with_another_dataset_is_refused(tmp_path, saved, script):
    (tmp_path / "checkpoint").mkdir()
    file = tmp_path / "checkpoint/model.pt"
    file.write_bytes(saved)
    state = torch.load(file, weights_only=True)
    state["settings"]["dataset"] = "cifar10"
    torch.save(state, file)
    assert "made with --dataset cifar10, not digits; use --dataset cifar10" in refusal_of_file(tmp_path, script)


class Trap:
    """Who loads it as a pickle makes a folder."""

    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (self.folder,)


OTHER_FILES = {
    "empty": lambda file, saved: file.write_bytes(b""),
    "text": lambda file, saved: file.write_text("hello\nworld\n"),
    "half of a checkpoint": lambda file, saved: file.write_bytes(saved[: len(saved) // 2]),
    "weights only": lambda file, saved: torch.save(torch.nn.Linear(2, 2).state_dict(), file),
    "a list": lambda file, saved: torch.save([1, 2, 3], file),
    "a program": lambda file, saved: torch.save(Trap(str(file) + ".run"), file),
}


@every_script
@pytest.mark.parametrize("kind", OTHER_FILES)
def test_a_file_that_is_no_checkpoint_is_refused(tmp_path, saved, script, kind):
    (tmp_path / "checkpoint").mkdir()
    OTHER_FILES[kind](tmp_path / "checkpoint/model.pt", saved)
    line = refusal_of_file(tmp_path, script)
    assert line.startswith("is damaged or not a checkpoint of these scripts (")
    assert line.endswith("); move it away") and len(line) < 300


@every_script
def test_a_checkpoint_in_a_folder_that_does_not_exist_is_refused_before_the_first_epoch(tmp_path, script):
    missing = tmp_path / "missing"
    line = refusal(tmp_path, script, "--checkpoint", missing / "model.pt")
    assert line == f"--checkpoint {missing / 'model.pt'} has no folder; make it first: mkdir -p {missing}"
    assert not missing.exists()


@every_script
def test_a_checkpoint_that_is_a_folder_is_refused(tmp_path, script):
    line = refusal(tmp_path, script, "--checkpoint", tmp_path)
    assert line == f"--checkpoint {tmp_path} is a folder; name a file in it, such as {tmp_path / 'model.pt'}"


# The loss


@every_script
def test_a_loss_that_is_not_finite_ends_the_run_and_is_not_saved(tmp_path, script):
    first = "1 process on CPU", "2 processes on CPU"
    line = refusal(tmp_path, script, "--lr", "1e9", "--batch-size", 240, first=first)
    assert line == "the loss of epoch 1 is nan; try an --lr below 1e+09"


# Once, however many processes run


def test_four_processes_say_it_once_even_if_the_one_that_speaks_is_slow(tmp_path):
    late = "    import os, time; time.sleep(2 * (os.environ['RANK'] == '0'))\n"
    script = edited(tmp_path, TORCHRUN, ("def main(argv=None):\n", "def main(argv=None):\n" + late))
    assert "does not divide among 4" in refusal(tmp_path, script, "--batch-size", 3, nproc=4)


def test_four_processes_print_the_help_once(tmp_path):
    run = run_script(tmp_path, TORCHRUN, "--help", nproc=4)
    assert (run.status, run.stderr, run.stdout.count("usage:"), run.stdout.count("--batch-size")) == (0, "", 1, 2)
    assert "(default: 48)" in run.stdout


# As a person starts it: by Python or by torchrun, not by this harness


def started(*words):
    """What became of a command, with none of the variables of torchrun."""
    environment = {name: value for name, value in os.environ.items() if name not in torchrun_numbers(0, 1)}
    command = [sys.executable, *words]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)


def test_the_torchrun_script_started_by_python_says_how_to_start_it():
    result = started(TORCHRUN)
    assert (result.returncode, result.stdout, result.stderr) == (2, "", START + "\n")


def test_a_process_that_was_numbered_by_hand_says_so_too_and_waits_for_no_other(tmp_path, monkeypatch, capsys):
    """With RANK=1 and WORLD_SIZE=1, without torchrun's LOCAL_WORLD_SIZE."""
    result = run_script(tmp_path, TORCHRUN, environment={"RANK": "1", "LOCAL_WORLD_SIZE": ""})
    assert (result.status, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert result.stderr.startswith(START.removesuffix(TORCHRUN))
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("it waits"))
    with pytest.raises(SystemExit) as refused:
        parse_args([], world_size=1, local_world_size=0, speaks=False)
    assert refused.value.code == 2
    assert capsys.readouterr().err.startswith(START.removesuffix(TORCHRUN))


@pytest.mark.parametrize(("name", "shown"), [("mine/my_train.py", "my_train.py"), ("-c", TORCHRUN)])
def test_the_command_that_is_shown_names_the_script_that_was_started(name, shown, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [name])
    with pytest.raises(SystemExit):
        parse_args([], world_size=0, local_world_size=0)
    assert capsys.readouterr().err == f"{START.removesuffix(TORCHRUN)}{shown}\n"


@pytest.mark.parametrize("script", SCRIPTS[:2])
def test_a_script_without_a_group_for_torchrun_refuses_to_train_in_each_of_its_processes(script, tmp_path):
    variables = {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "2", "RANK": "0"}
    result = run_script(tmp_path, script, nproc=2, environment=variables)
    line = "torchrun's processes would each train alone; give it ddp_torchrun.py, or start this script with python\n"
    assert (result.status, result.stdout, result.stderr) == (2, "", line)


def test_of_the_processes_that_would_train_alone_only_the_first_says_so_at_once(monkeypatch):
    for name, value in {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "2", "RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(time, "sleep", lambda seconds: (_ for _ in ()).throw(InterruptedError))
    with pytest.raises(InterruptedError):
        parse_args([])


def test_the_torchrun_script_started_by_python_still_shows_its_help(capsys):
    with pytest.raises(SystemExit) as shown:
        parse_args(["--help"], world_size=0, local_world_size=0)
    assert shown.value.code == 0 and "--batch-size" in capsys.readouterr().out


def test_torchrun_passes_the_line_on_once_and_without_a_traceback_of_ours():
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", TORCHRUN]
    run = started(*launch, "--lr", "1e9", "--batch-size", "240")
    assert run.returncode == 1 and run.stderr.count("the loss of epoch 1 is nan; try an --lr below 1e+09") == 1, run.stderr
    assert 'ddp_torchrun.py", line' not in run.stderr


# More processes than GPUs: simulated, since where a GPU is present there may be many


@pytest.fixture
def two_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


def test_more_processes_than_gpus_are_refused(two_gpus, capsys):
    with pytest.raises(SystemExit) as refused:
        parse_args([], world_size=3, local_world_size=3)
    assert refused.value.code == 2
    way_out = "start at most 2, or set CUDA_VISIBLE_DEVICES= (empty) to run on the CPU"
    assert capsys.readouterr() == ("", f"3 processes need as many GPUs, this machine shows 2; {way_out}\n")


def test_gpus_that_cuda_cannot_use_start_no_processes(two_gpus, monkeypatch):
    """Too new for the driver, they are counted all the same."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    for usable, nproc in (True, 8), (False, 2):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: usable)
        assert parse_args([], world_size=None).world_size == nproc


def test_more_processes_than_the_gpus_of_one_machine_may_run_on_two(two_gpus):
    assert parse_args([], world_size=4, local_world_size=2).world_size == 4


# The cores


@pytest.fixture
def twelve_cores(monkeypatch):
    """Simulated, so that shares differ on every machine; and OMP_NUM_THREADS is not set."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(12)), raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


@pytest.mark.parametrize("processes, threads", [(1, 12), (2, 6), (8, 1), (12, 1), (16, 1)])
def test_each_process_gets_its_share_of_the_cores_and_at_least_one(twelve_cores, processes, threads):
    assert parse_args([], world_size=48, local_world_size=processes).threads == threads
    assert parse_args(["--nproc", str(processes), "--batch-size", "48"], world_size=None).threads == threads


@pytest.mark.parametrize("chosen", ["2", "7"])
def test_a_chosen_number_of_threads_is_kept(twelve_cores, monkeypatch, chosen):
    monkeypatch.setenv("OMP_NUM_THREADS", chosen)
    assert parse_args([], world_size=3, local_world_size=3).threads == int(chosen)


@pytest.mark.parametrize("unchosen", ["1", "0", "", "4,3", "99999999999"])
def test_the_one_thread_that_torchrun_sets_is_no_choice_and_what_is_no_number_neither(
    twelve_cores, monkeypatch, unchosen
):
    monkeypatch.setenv("OMP_NUM_THREADS", unchosen)
    assert parse_args([], world_size=3, local_world_size=3).threads == 4


def test_a_single_process_and_the_script_that_starts_its_own_keep_a_choice_of_one_thread(twelve_cores, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert parse_args([]).threads == parse_args([], world_size=None).threads == 1


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system cannot take cores from a process")
def test_cores_that_were_taken_from_the_process_do_not_count(tmp_path):
    assert run_ranks(tmp_path, _threads_on_one_core, nproc=1) == [1]


def _threads_on_one_core(rank):
    os.environ.pop("OMP_NUM_THREADS", None)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    return parse_args([]).threads
