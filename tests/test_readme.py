"""The README: its commands run as they stand, what it shows is what they print, its limits hold.

The recipes run in test_recipes.py, what is for several machines in test_machines.py, chaos.py, timeline.py and
benchmark.py in the tests of their names; the line with pytest is how this runs.
"""

import ast
import contextlib
import os
import re
import signal
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed import run as torchrun

from common.options import parse_args
from tests.conftest import newest
from tests.processes import EPOCH, ROOT, SCRIPTS, edited, epochs_printed, run_command, run_script, started, wait_for

README = (ROOT / "README.md").read_text()
PROOFS = re.findall(r"^\| (.+) \| (.+) \|$", (ROOT / "tests/README.md").read_text(), re.MULTILINE)[1:]
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
COMMANDS = [line for kind, text in BLOCKS if kind == "bash" for line in text.splitlines() if "pytest" not in line]
ENVIRONMENT = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
ENVIRONMENT["PIP_DISABLE_PIP_VERSION_CHECK"] = "1"


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """The files of the repository, as in a fresh clone."""
    folder = tmp_path_factory.mktemp("clone")
    for name in [*SCRIPTS, "common", "tests", "requirements.txt"]:
        (folder / name).symlink_to(ROOT / name)
    return folder


@pytest.fixture(scope="module")
def results(clone):
    """What became of each command, one after the other, as a reader types them."""
    return {line: run_command("bash", "-ec", line, cwd=clone, environment=ENVIRONMENT) for line in COMMANDS}


def shown(command):
    """The lines in the block below the block of a command."""
    [text] = re.findall(rf"^{re.escape(command)}\n```\n```\w+\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
    return text.splitlines()


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_runs_as_it_stands(command, results):
    assert results[command].returncode == 0, results[command].stderr
    warned = r"run\.py|OMP_NUM_THREADS|[*]{9}|^$"  # what torchrun says
    assert [line for line in results[command].stderr.splitlines() if not re.search(warned, line)] == []


@pytest.mark.parametrize("command", re.findall(r"`(diff -U\d .+?)`", README))
def test_a_diff_is_what_its_command_prints_without_comments(command, tmp_path):
    for script in SCRIPTS:
        lines = (ROOT / script).read_text().splitlines()
        code = [line for line in lines if line and not line.lstrip().startswith(("#", '"""'))]
        (tmp_path / script).write_text("\n".join(code) + "\n")
    printed = run_command(*command.split(), cwd=tmp_path).stdout.splitlines()[2:]
    headers = ["@@"] if "-U1" in command else []
    expected = [line for each in printed for line in (headers if each.startswith("@@") else [each])]
    [text] = re.findall(rf"`{command}`.*?\n```diff\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
    assert len(expected) >= 16 and text.splitlines() == expected


def test_the_first_screen_shows_what_the_two_commands_print_and_the_first_losses_agree_in_every_digit(results):
    first_losses, curves = [], []
    opened = r" on CPU \(threads each: \d+\); 1,437 training and 360 test images; global batch 48; 58,634 parameters"
    for command, processes in zip(COMMANDS[1:3], ("1 process", "2 processes"), strict=True):
        first, _, last = shown(command)
        opening, *epochs, _ = results[command].stdout.splitlines()
        assert re.fullmatch(processes + opened, opening) and len(epochs) == 10
        for line, real, near in (first, epochs[0], 5e-5), (last, epochs[-1], 0.2):  # float32
            assert re.fullmatch(EPOCH, line) and line.split("loss")[0] == real.split("loss")[0]
            [[loss, accuracy]], [[real_loss, real_accuracy]] = epochs_printed(line), epochs_printed(real)
            assert loss == pytest.approx(real_loss, rel=near) and abs(accuracy - real_accuracy) < 0.6  # two images
        first_losses.append(re.search(EPOCH, first)[1])
        curves.append(epochs_printed(results[command].stdout))
    assert first_losses[0] == first_losses[1]
    assert [loss for loss, _ in curves[1]] == pytest.approx([loss for loss, _ in curves[0]], abs=0.01)  # 0.0022 seen
    assert min(curve[-1][1] for curve in curves) >= 98
    assert "Setting OMP_NUM_THREADS environment variable for each process to be 1 " in results[command].stderr


def test_another_script_resumes_the_file_and_so_does_a_run_that_torchrun_would_restart(results, clone):
    spawn, single, restarts = (command for command in COMMANDS if "--checkpoint" in command)
    assert results[spawn].stdout.splitlines()[-1] == "saved in model.pt"
    assert "resuming from model.pt after epoch 3 of 5 (--epochs)\nepoch 4/5  " in results[single].stdout
    assert "resuming from model.pt after epoch 5 of 6 (--epochs)\nepoch 6/6  " in results[restarts].stdout
    left = {path.name for path in clone.iterdir()} - {*SCRIPTS, "common", "tests", "requirements.txt", "__pycache__"}
    assert left == {"model.pt"}


@pytest.mark.parametrize("seed", [4, 5])  # of 0 to 5 those whose losses differ most
def test_in_float32_the_losses_of_the_first_epoch_agree_to_some_1e_4_of_the_loss(seed, tmp_path):
    options = ["--epochs", 1, "--seed", seed]
    runs = run_script(tmp_path, SCRIPTS[0], *options), run_script(tmp_path, SCRIPTS[2], *options, nproc=4)
    [[alone, _]], [[parted, _]] = (epochs_printed(run.stdout) for run in runs)
    assert parted == pytest.approx(alone, rel=5e-4)


def test_a_script_with_two_lines_replaced_trains_on_other_data(tmp_path):
    lines = next(text for kind, text in BLOCKS if kind == "python").splitlines()
    loaded, built = "load_data(args.dataset, args.data_root)", "build_model(args.model, train_set).to(device)"
    edits = zip((f"train_set, test_set = {loaded}", f"model = {built}"), lines, strict=True)
    result = run_script(tmp_path, edited(tmp_path, SCRIPTS[2], *edits), "--epochs", 1, nproc=2)
    assert "960 training and 960 test images" in result.stdout and "650 parameters" in result.stdout


def test_the_lines_of_the_profiler_write_a_timeline(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    around, after = re.findall(r"`((?:with torch\.)?profiler\.\w+\(.*?)`", README)
    exec(f"{around} torch.ones(2).sum()\n{after}", {"torch": torch})
    assert "aten::sum" in Path("trace.json").read_text()


def test_a_breakpoint_in_rank_0_reads_the_terminal_and_the_module_form_of_torchrun_reads_PET_variables(tmp_path):
    assert "`if rank == 0: breakpoint()`" in README and "`python -m torch.distributed.run`" in README
    stop = ("        totals = torch", "        if rank == 0: breakpoint()\n        totals = torch")
    command = sys.executable, "-m", "torch.distributed.run", "--standalone", edited(tmp_path, SCRIPTS[2], stop)
    environment = {"PET_NPROC_PER_NODE": "2", "PYTHONPATH": str(ROOT)}
    result = run_command(*command, "--epochs", 1, text="p rank, world_size\nc\n", environment=environment)
    assert "(Pdb) (0, 2)\n" in result.stdout and len(epochs_printed(result.stdout)) == 1


@newest
def test_a_hangup_ends_torchrun_below_nohup_unless_it_is_told_which_signals_to_handle(tmp_path):
    assert "SIGHUP" in torchrun.parse_args(["script.py"]).signals_to_handle
    [command] = re.findall(r"`(nohup torchrun .+?)`", README)
    words = f"exec {command.replace('ddp_torchrun.py', str(ROOT / SCRIPTS[2]))} --epochs 1000 --batch-size 480"
    with started("bash", "-c", f"{words} > printed", cwd=tmp_path, environment=ENVIRONMENT) as process:
        epochs = lambda: len(epochs_printed((tmp_path / "printed").read_text()))  # noqa: E731
        assert wait_for(lambda: (tmp_path / "printed").exists() and epochs())
        for pid in process.family():  # as a terminal does that closes
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGHUP)
        before = epochs()
        assert wait_for(lambda: epochs() > before + 10)


@newest
def test_with_local_addr_standalone_starts_where_the_name_of_the_machine_has_another_address(tmp_path):
    assert "`--local_addr=127.0.0.1`" in README
    (tmp_path / "hosts").write_text(f"127.0.0.1 localhost\n192.0.2.1 {os.uname().nodename}\n")  # RFC 5737: nobody's
    mount = f"mount --bind {tmp_path}/hosts /etc/hosts"
    inside = ["unshare", "--map-root-user", "--mount", "bash", "-ec"]
    if run_command(*inside, mount).returncode:
        pytest.skip("no mount namespace")
    command = f"torchrun --standalone --local_addr=127.0.0.1 --nproc_per_node=2 {SCRIPTS[2]} --epochs 1"
    result = run_command(*inside, f"{mount}; {command}", environment=ENVIRONMENT)
    assert len(epochs_printed(result.stdout)) == 1, result.stderr


def test_a_port_that_another_run_has_is_EADDRINUSE():
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with pytest.raises(RuntimeError, match="EADDRINUSE"):
        torch.distributed.TCPStore("127.0.0.1", store.port, is_master=True, wait_for_workers=False)


def test_each_option_of_the_help_is_in_the_table_with_its_default(capsys):
    with pytest.raises(SystemExit):
        parse_args(["--help"], local_world_size=None)
    options = set(re.findall(r"^  (--[\w-]+)", capsys.readouterr().out, re.MULTILINE))
    rows = dict(re.findall(r"^\| `(--[\w-]+)` \| (.+?) \|", README, re.MULTILINE))
    assert options == set(rows) and len(rows) == 9
    for option, default in rows.items():
        if option not in ("--nproc", "--checkpoint"):
            assert str(vars(parse_args([]))[option[2:].replace("-", "_")]) == default.strip("`")


def test_each_file_and_each_heading_that_is_linked_or_named_exists():
    files = set(re.findall(r"`((?:common|tests)/[\w.]+|\w+\.py)`", README))
    assert len(files) >= 7 and all((ROOT / file).exists() for file in files)
    headings = {heading.lower().replace(" ", "-") for heading in re.findall(r"^## ([\w ]+)$", README, re.MULTILINE)}
    for link in re.findall(r"\]\((.+?)\)", README):
        assert link.startswith("https://") or link[1:] in headings or (ROOT / link).exists(), link


def test_the_readme_is_short_and_so_are_its_lines():
    lesson = re.sub(r"<details>.*?</details>", "", README, flags=re.DOTALL)
    prose = re.sub(r"^```.*?^```|^\|.*?$", "", README, flags=re.DOTALL | re.MULTILINE)
    assert len(README.split()) <= 4200 and len(lesson.split()) <= 1800
    assert max(map(len, re.sub(r"\]\([^)]*\)", "]", prose).splitlines())) <= 120


def test_each_sentence_that_has_a_proof_stands_in_the_readme_or_in_a_script_and_its_test_exists():
    texts = " ".join([README, *((ROOT / script).read_text() for script in SCRIPTS)])
    tests = {
        f"{path.name}::{node.name}"
        for path in (ROOT / "tests").glob("test_*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef)
    }
    for sentence, names in PROOFS:
        assert " ".join(sentence.split()) in " ".join(texts.split()), sentence
        assert set(re.findall(r"`(.+?)`", names)) <= tests and "::test_" in names, names


def test_each_comment_symptom_belief_and_recipe_has_a_proof():
    comments = [each for name in SCRIPTS for each in re.findall(r"# (Without .+\.)", (ROOT / name).read_text())]
    text = re.sub(r"\n  (?=\S)", " ", README)  # a point of a list is one line
    starts = "## When it hangs", "often believed</summary>", "## Recipes"
    wrong, believed, recipes = (text.split(start)[1].split("\n## ")[0] for start in starts)
    symptoms = re.findall(r"^\| ([^|]+) \| [^|]+ \| [^|]+ \|$|^- (.+?)(?<! ): ", wrong, re.MULTILINE)[1:]
    beliefs = re.findall(r"^- (\*[^*]+\*) ", believed, re.MULTILINE)
    titles = re.findall("<summary>(.+?)</summary>", recipes)
    assert (len(symptoms), len(beliefs), len(titles)) == (20, 9, 13)
    expected = {*comments, *map("".join, symptoms), *beliefs, *titles}
    assert not expected - {sentence for sentence, _ in PROOFS}


def test_no_file_of_tests_imports_another():
    for path in (ROOT / "tests").glob("*.py"):
        assert not re.search(r"^ *(from|import) tests(\.| import .*\b)test_", path.read_text(), re.MULTILINE)
