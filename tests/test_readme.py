"""The README: its commands run as they stand, its outputs have the shape of real ones, its diffs are the real ones.

chaos.py runs in test_faults.py, timeline.py in test_timeline.py, benchmark.py in test_benchmark.py, the recipes in
test_recipes.py, what is for several machines in test_machines.py; the line with pytest is how this runs.
"""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from common.data import load_data
from common.model import build_model
from common.options import parse_args
from tests.processes import ROOT, SCRIPTS, run_script
from tests.test_commands import EPOCH

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


def commands():
    """The commands that run here, those in a block of their own and the diffs, each with the block that shows its end."""
    found, last = {}, (0, "")
    pieces = re.finditer(r"^```(\w+)\n(.*?)^```|`(diff -[^`]+)`", README, re.DOTALL | re.MULTILINE)
    for piece in pieces:
        kind, text, inline = piece.groups()
        if kind == "bash" or inline:
            for command in (text or inline).strip().splitlines():
                last = piece.end(), command
                found[command] = ""
        elif kind in ("text", "diff") and README[last[0] : piece.start()].count("\n") <= 1:
            found[last[1]] = text
    return {command: shown for command, shown in found.items() if "pytest" not in command}


COMMANDS = commands()


def run(command, folder):
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    return subprocess.run(
        ["bash", "-e", "-c", command], cwd=folder, env=environment, capture_output=True, text=True, timeout=200
    )


def shape(line):
    """A line with each number replaced, so that two runs on two machines compare."""
    return re.sub(r"\d[\d.,]*", "0", line).replace("0 threads", "0 thread")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The files of the repository, as in a fresh clone."""
    folder = tmp_path_factory.mktemp("clone")
    for name in [*SCRIPTS, "common", "tests", "requirements.txt"]:
        (folder / name).symlink_to(ROOT / name)
    return folder


@pytest.fixture(scope="module")
def results(folder):
    """What became of each command, one after the other, as a reader types them."""
    return {command: run(command, folder) for command in COMMANDS}


@pytest.fixture(scope="module")
def printed(results):
    """What each script printed when it ran first, by its name."""
    runs = [(re.search(r"\w+\.py", command)[0], command) for command in COMMANDS if "diff" not in command]
    return {name: results[command] for name, command in reversed(runs)}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_runs_as_it_stands_and_prints_what_is_shown(command, results):
    result = results[command]
    assert result.returncode == 0, result.stderr
    shown = COMMANDS[command]
    if shown.startswith(("1 process", "2 processes")):
        first, *_, last_epoch, last = shown.strip().splitlines()
        lines = result.stdout.splitlines()
        start = [shape(line) for line in lines].index(shape(first))
        assert [shape(line).split("eta")[0] for line in lines[-2:]] == [shape(last_epoch).split("eta")[0], last]
        assert len(lines) - start == 12
    elif command.startswith("diff"):
        assert shown and result.stdout == shown


def test_every_script_prints_a_line_at_the_start_one_an_epoch_and_where_the_model_is(printed):
    not_saved = "not saved; --checkpoint PATH saves the model"
    for script, processes, epochs, expected in (
        ("ddp_torchrun.py", "2 processes", 10, not_saved),
        ("single_gpu.py", "1 process", 10, not_saved),
        ("ddp_mp_spawn.py", "3 processes", 3, "saved in model.pt"),
    ):
        lines = printed[script].stdout.splitlines()
        first, *between, last = lines[-epochs - 2 :]  # pip prints before
        assert first.startswith(f"{processes} on CPU with ")
        for fact in "1,437 training and 360 test images", "global batch 48", "58,634 parameters":
            assert fact in first
        assert len(between) == epochs and all(re.fullmatch(EPOCH, line) for line in between)
        assert last == expected


def test_another_script_goes_on_with_the_file_after_the_epochs_that_are_finished(results):
    [command] = [command for command in COMMANDS if command.startswith("python single_gpu.py --epochs")]
    _, going_on, fourth, fifth, saved = results[command].stdout.splitlines()
    assert going_on == "going on from model.pt after epoch 3" and saved == "saved in model.pt"
    assert fourth.startswith("epoch 4/5  ") and fifth.startswith("epoch 5/5  ")


def test_all_scripts_print_the_same_losses_and_accuracies(printed):
    seen = [re.findall(EPOCH, result.stdout) for result in printed.values()]
    for others in seen[1:]:
        for (loss, accuracy), (other_loss, other_accuracy) in list(zip(seen[0], others, strict=False))[:3]:
            assert float(other_loss) == pytest.approx(float(loss), abs=1e-3)  # float32
            assert float(other_accuracy[:-1]) == pytest.approx(float(accuracy[:-1]), abs=0.6)  # two images


def test_a_run_that_goes_well_writes_nothing_to_stderr(printed):
    for script, result in printed.items():
        ours = [line for line in result.stderr.splitlines() if not re.search("run.py|OMP_NUM_THREADS|[*]{9}|^$", line)]
        assert ours == [], script  # what torchrun says of OMP_NUM_THREADS


def test_a_run_leaves_nothing_behind_but_what_it_was_asked_for(results, folder):
    left = {path.name for path in folder.iterdir()} - {*SCRIPTS, "common", "tests", "requirements.txt", "__pycache__"}
    assert left == {"model.pt"}


def test_the_saved_model_is_loaded_by_the_line_that_is_shown(results, folder, monkeypatch):
    [line] = re.findall(r"`(model\.load_state_dict\(.+?)`", README)
    args = parse_args([])
    model = build_model(args, load_data(args)[0])
    before = model[1].weight.clone()
    monkeypatch.chdir(folder)
    exec(line, {"model": model, "torch": torch})
    assert not torch.equal(model[1].weight, before)


def test_each_comment_has_its_row_and_each_row_names_tests_that_exist():
    comments = set()
    for script in SCRIPTS:
        comments |= set(re.findall(r"^ *# (Without .+\.)$", (ROOT / script).read_text(), re.MULTILINE))
    rows = re.findall(r"^\| .+ \| (Without .+\.) \| (.+) \|$", README, re.MULTILINE)
    assert {sentence for sentence, _ in rows} == comments and len(rows) == len(comments) == 15
    assert all('"test_' in names for _, names in rows)


def test_each_row_of_the_tables_of_claims_names_tests_that_exist_and_those_for_gpus_say_so():
    tests = {
        node.name: path.name
        for path in (ROOT / "tests").glob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
    }
    named = re.findall(r'(on GPUs )?\[test\]\(tests/(\w+\.py) "(test_\w+)"\)', README)
    assert len(named) == len(re.findall('"test_', README)) > 40 and "`test_" not in README
    assert all(tests[name] == file and (file == "test_cuda.py") == bool(gpu) for gpu, file, name in named)
    for heading in "What each line is for", "What is often believed", "When it goes wrong":
        [section] = re.findall(rf"^## {heading}\n(.*?)^## ", README, re.DOTALL | re.MULTILINE)
        rows = [line for line in section.splitlines() if line.startswith("| ")][2:]
        assert len(rows) >= 9 and all('"test_' in row.split("|")[-2] for row in rows)


def test_each_file_and_each_heading_that_is_linked_or_named_exists():
    files = set(re.findall(r"`((?:common|tests)/[\w.]+|\w+\.py)`", README)) - {"my_train.py"}
    assert len(files) >= 7 and all((ROOT / file).exists() for file in files)
    anchors = re.findall(r"\]\(#([\w-]+)\)", README)
    headings = re.findall(r"^#+ (.*)", README, re.MULTILINE)
    headings = {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}
    assert anchors and set(anchors) <= headings
    for link in re.findall(r"\]\(([^#) ]+)", README):
        assert link.startswith("https://") or (ROOT / link).exists(), link


def test_each_option_of_the_help_is_in_the_table_with_its_default(capsys):
    with pytest.raises(SystemExit) as ended:
        parse_args(["--help"], world_size=None)
    assert ended.value.code == 0
    options = set(re.findall(r"^  (--[\w-]+)", capsys.readouterr().out, re.MULTILINE))
    rows = dict(re.findall(r"^\| `(--[\w-]+)` \| (.+?) \|", README, re.MULTILINE))
    assert options == set(rows) and len(rows) == 9
    defaults = vars(parse_args([]))
    for option, default in rows.items():
        if option not in ("--nproc", "--checkpoint"):
            assert str(defaults[option[2:].replace("-", "_")]) == default.strip("`")


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 400


def test_a_script_with_two_lines_replaced_trains_on_other_data(tmp_path):
    """The two lines of the README, in a copy of the script for torchrun."""
    [lines] = [text.strip().splitlines() for kind, text in BLOCKS if kind == "python"]
    source = (ROOT / "ddp_torchrun.py").read_text()
    for line, name in zip(lines, ("train_set, test_set = load_data(args)", "model = build_model("), strict=True):
        [old] = [text for text in source.splitlines() if text.strip().startswith(name)]
        source = source.replace(old, f"    {line}")
    (tmp_path / "my_ddp_torchrun.py").write_text(source)
    result = run_script(tmp_path, tmp_path / "my_ddp_torchrun.py", "--epochs", 1, nproc=2)
    assert result.status == 0, result.stderr
    assert "960 training and 960 test images" in result.stdout and "650 parameters" in result.stdout
