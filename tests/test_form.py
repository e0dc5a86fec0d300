"""The scripts as texts: short, alike but for DDP, in the same order, and commented where they differ."""

import ast
import difflib
import io
import os
import re
import tokenize

import pytest
import torch

from tests.processes import ROOT, SCRIPTS, run_ranks

SINGLE, SPAWN, TORCHRUN = SCRIPTS
LINES = {SINGLE: 50, SPAWN: 66, TORCHRUN: 66}
CHANGED = {(SINGLE, TORCHRUN): 40, (SINGLE, SPAWN): 44, (SPAWN, TORCHRUN): 22}


def code(script):
    """The lines of a script without blank lines, comments and docstrings."""
    source = (ROOT / script).read_text()
    lines = dict(enumerate(source.splitlines(), 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            for number in range(node.lineno, node.end_lineno + 1):
                lines[number] = ""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            lines[token.start[0]] = lines[token.start[0]][: token.start[1]]
    return [line.rstrip() for line in lines.values() if line.strip()]


def hunks(old, new):
    """(old lines, new lines) of each place where two lists of lines differ."""
    opcodes = difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
    return [(old[i1:i2], new[j1:j2]) for tag, i1, i2, j1, j2 in opcodes if tag != "equal"]


def loop(script):
    """The code from the line that seeds to the end."""
    lines = code(script)
    return lines[lines.index("    torch.manual_seed(args.seed)") :]


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_is_short(script):
    assert 20 < len(code(script)) <= LINES[script]


@pytest.mark.parametrize("pair", CHANGED)
def test_few_lines_differ_between_two_scripts(pair):
    changed = sum(len(old) + len(new) for old, new in hunks(code(pair[0]), code(pair[1])))
    assert 10 < changed <= CHANGED[pair]


def test_below_the_line_that_seeds_the_two_ddp_scripts_are_the_same_to_the_byte():
    spawn, torchrun = ((ROOT / script).read_text().split("    torch.manual_seed(args.seed)\n") for script in SCRIPTS[1:])
    assert len(spawn) == len(torchrun) == 2
    assert spawn[1] == torchrun[1]


@pytest.mark.parametrize("script", SCRIPTS[1:])
def test_below_the_line_that_seeds_each_idea_makes_one_hunk_and_ideas_do_not_touch(script):
    """Join the group, then these seven. Indentation aside."""
    single, ddp = ([line.strip() for line in loop(name)] for name in (SINGLE, script))
    ideas = ["DistributedSampler(", "DistributedDataParallel(", "set_epoch(", "ddp_model(images)"]
    ideas += ["all_reduce(metrics)", "if rank == 0:", "destroy_process_group()"]
    found = hunks(single, ddp)
    assert len(found) == len(ideas)
    for idea, (old, new) in zip(ideas, found, strict=True):
        assert idea in new[0] and len(new) == (3 if "Sampler" in idea else 1) and len(old) <= len(new)


def test_the_loops_do_the_same_things_in_the_same_order():
    order = [
        "manual_seed(args.seed)", "load_data(", "sampler = ", "train_loader = ", "test_loader = ", "model = build_model",
        "optimizer = ", "first_epoch = load_checkpoint(", "describe(", "for epoch in range(first_epoch, args.epochs)",
        "for images, labels in train_loader", "F.cross_entropy(", "zero_grad()", "loss.backward()", "optimizer.step()",
        "count_correct(model, test_loader, device)", "report(", "save_checkpoint(", '__name__ == "__main__"', "main()",
    ]  # fmt: skip
    for script in SCRIPTS:
        source = "\n".join(loop(script))
        places = [source.index(step) for step in order]
        assert places == sorted(places), script


def test_between_the_batch_and_the_step_only_the_call_of_the_model_differs():
    def step(script):
        lines = [line.strip() for line in loop(script)]
        return lines[lines.index("for images, labels in train_loader:") : lines.index("optimizer.step()") + 1]

    for script in SCRIPTS[1:]:
        [(old, new)] = hunks(step(SINGLE), step(script))
        assert old == ["loss = F.cross_entropy(model(images), labels)"]
        assert new == ["loss = F.cross_entropy(ddp_model(images), labels)"]


def test_the_baseline_has_no_comment_and_a_ddp_script_says_above_each_change_what_it_is_for():
    counted = {}
    for script in SCRIPTS:
        lines = (ROOT / script).read_text().splitlines()
        comments = [(number, line) for number, line in enumerate(lines) if line.lstrip().startswith("#")]
        counted[script] = len(comments)
        for number, line in comments:
            assert re.fullmatch(r" *# Without .+\.", line), f"{script}: a comment says what breaks without the line"
            assert lines[number + 1].strip() and not lines[number + 1].lstrip().startswith("#"), "one line above code"
            assert lines[number + 1].rstrip() not in code(SINGLE), f"{script}: {line.strip()} stands above a change"
        assert not any(re.search(r"\S.*\s#\s", line) for line in lines), "no comment stands behind code"
    assert counted == {SINGLE: 0, SPAWN: 12, TORCHRUN: 13}


def test_the_wrapped_model_is_called_on_one_line_and_used_nowhere_else():
    for script in SCRIPTS[1:]:
        assert [line.strip().split(" = ")[0] for line in code(script) if "ddp_model" in line] == ["ddp_model", "loss"]
        assert ".module" not in "\n".join(code(script))


def test_no_collective_stands_under_a_condition():
    """A collective under `if rank == 0` waits for ever: the other ranks never come."""
    checked = 0
    for script in SCRIPTS[1:]:
        for node in ast.walk(ast.parse((ROOT / script).read_text())):
            if isinstance(node, ast.If):
                checked += 1
                calls = set(re.findall(r"dist\.\w+", ast.unparse(node)))
                assert calls <= {"dist.PrefixStore"} and "ddp_model" not in ast.unparse(node)
    assert checked == 2 * 3 + 1  # GPU, rank 0, __main__; the agent's store


def test_the_scripts_use_the_names_of_the_field_and_no_branches_for_ddp():
    names = r"\b(gpu|gpu_id|net|ddp_rank|master|Trainer|(?<!torch\.)utils|helpers|snapshot|ckpt)\b"
    ways = r"if ddp|world_size > 1|\.item\(\)|barrier|device_count|rank %|except|class |lambda"
    for script in SCRIPTS:
        assert not re.search(f"{names}|{ways}", "\n".join(code(script))), script
        assert max(map(len, (ROOT / script).read_text().splitlines())) <= 120


def visible_devices(rank):
    return os.environ["CUDA_VISIBLE_DEVICES"], torch.cuda.is_available()


def test_all_tests_but_those_of_gpus_run_on_the_cpu(tmp_path):
    assert run_ranks(tmp_path, visible_devices, nproc=1) == [("", False)]


def test_each_shared_file_is_short():
    sizes = {path.name: len(path.read_text().splitlines()) for path in (ROOT / "common").glob("*.py")}
    assert len(sizes) == 10 and max(sizes.values()) <= 110, sizes


def test_importing_a_script_starts_and_prints_nothing(capfd):
    import ddp_mp_spawn
    import ddp_torchrun
    import single_gpu

    assert all(callable(script.main) for script in (single_gpu, ddp_mp_spawn, ddp_torchrun))
    assert capfd.readouterr() == ("", "")
