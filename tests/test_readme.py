"""The README: its commands run as they stand, its outputs have the shape of real ones, its diffs are the real ones.

The line with chaos.py runs in test_faults.py, the line with pytest is how this runs.
"""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import ROOT, SCRIPTS

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, re.DOTALL)
COMMANDS = [text.strip() for kind, text in BLOCKS if kind == "bash" and not re.search("pytest|chaos", text)]


def run(command, folder):
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "CUDA_VISIBLE_DEVICES": "", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
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


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_runs_as_it_stands_and_prints_what_is_shown(command, folder):
    result = run(command, folder)
    assert result.returncode == (1 if command.startswith("diff") else 0), result.stderr
    kind, shown = BLOCKS[[text.strip() for _, text in BLOCKS].index(command) + 1]
    if kind == "text" and shown.startswith(("1 process", "2 processes")):
        first, *_, last_epoch, last = shown.strip().splitlines()
        printed = result.stdout.splitlines()
        start = [shape(line) for line in printed].index(shape(first))
        assert [shape(line).split("eta")[0] for line in printed[-2:]] == [shape(last_epoch).split("eta")[0], last]
        assert len(printed) - start == 12
    elif kind == "diff":
        assert result.stdout.splitlines()[2:] == shown.splitlines()


def test_each_comment_has_its_row_and_each_row_names_tests_that_exist():
    comments = set()
    for script in SCRIPTS:
        comments |= set(re.findall(r"^ *# (Without .+\.)$", (ROOT / script).read_text(), re.MULTILINE))
    rows = re.findall(r"^\| .+ \| (Without .+\.) \| (.+) \|$", README, re.MULTILINE)
    assert {sentence for sentence, _ in rows} == comments and len(rows) == len(comments) == 15
    tests = {
        node.name
        for path in (ROOT / "tests").glob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
    }
    for sentence, names in rows:
        named = re.findall(r"`(test_\w+)`", names)
        assert named and set(named) <= tests, sentence


def test_each_option_of_the_help_is_in_the_table_with_its_default(folder):
    from common.options import parse_args

    result = run("python ddp_mp_spawn.py --help", folder)
    options = set(re.findall(r"^  (--[\w-]+)", result.stdout, re.MULTILINE))
    rows = dict(re.findall(r"^\| `(--[\w-]+)` \| (.+?) \|", README, re.MULTILINE))
    assert options == set(rows) and len(rows) == 9
    defaults = vars(parse_args([]))
    for option, default in rows.items():
        if option not in ("--nproc", "--checkpoint"):
            assert str(defaults[option[2:].replace("-", "_")]) == default.strip("`")


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 400


def test_a_script_with_two_lines_replaced_trains_on_other_data(folder):
    """The two lines of the README, in a copy of the script for torchrun."""
    [lines] = [text.strip().splitlines() for kind, text in BLOCKS if kind == "python"]
    source = (ROOT / "ddp_torchrun.py").read_text()
    for line, name in zip(lines, ("train_set, test_set = load_data(args)", "model = build_model("), strict=True):
        [old] = [text for text in source.splitlines() if text.strip().startswith(name)]
        source = source.replace(old, f"    {line}")
    (folder / "my_train.py").write_text(source)
    result = run("torchrun --standalone --nproc_per_node=2 my_train.py --epochs 1", folder)
    assert result.returncode == 0, result.stderr
    assert "960 training and 960 test images" in result.stdout and "650 parameters" in result.stdout
