"""The scripts as texts: short, alike but for DDP, in the same order, and commented where they differ."""

import ast
import difflib
import re

from tests.processes import ROOT, SCRIPTS

SINGLE, SPAWN, TORCHRUN = SCRIPTS
LINES = {SINGLE: 43, SPAWN: 57, TORCHRUN: 57}
CHANGED = {(SINGLE, TORCHRUN): 31, (SINGLE, SPAWN): 36, (SPAWN, TORCHRUN): 19}
SEED = "    torch.manual_seed(args.seed)\n"
PATHS = [*SCRIPTS, *(f"common/{path.name}" for path in ROOT.glob("common/*.py"))]
TEXTS = {path: (ROOT / path).read_text() for path in PATHS}


def code(script):
    """The lines of a script without blank lines, comments and docstring."""
    return re.findall(r'^ *(?!#|""")\S.*$', TEXTS[script], re.MULTILINE)


def hunks(old, new):
    """(old lines, new lines) of each place where two lists of lines differ."""
    opcodes = difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
    return [(old[i1:i2], new[j1:j2]) for tag, i1, i2, j1, j2 in opcodes if tag != "equal"]


def test_the_scripts_and_what_they_share_are_short_and_few_lines_differ_between_two_scripts():
    for script, most in LINES.items():
        assert 40 < len(code(script)) <= most
    for pair, most in CHANGED.items():
        assert 15 < sum(len(old) + len(new) for old, new in hunks(*map(code, pair))) <= most
    sizes = {path: text.count("\n") for path, text in TEXTS.items() if path.startswith("common/")}
    assert len(sizes) == 8 and sizes["common/__init__.py"] == 0
    assert max(sizes.values()) <= 150 and sum(sizes.values()) <= 520, sizes


def test_below_the_line_that_seeds_the_two_ddp_scripts_are_the_same_to_the_byte():
    assert len({tail for script in (SPAWN, TORCHRUN) for _, tail in [TEXTS[script].split(SEED)]}) == 1


def test_below_the_line_that_seeds_each_idea_makes_one_hunk_and_ideas_do_not_touch():
    """Join the group, then these seven. Indentation aside."""
    ideas = {"DistributedSampler(": 3, "DistributedDataParallel(": 1, "set_epoch(": 1, "ddp_model(images)": 1}
    ideas |= {"all_reduce(totals)": 1, "if rank == 0:": 1, "destroy_process_group()": 1}
    tails = [code(script)[code(script).index(SEED.rstrip()) :] for script in (SINGLE, TORCHRUN)]
    found = hunks(*[[line.strip() for line in tail] for tail in tails])
    for (idea, size), (old, new) in zip(ideas.items(), found, strict=True):
        assert idea in new[0] and len(old) <= len(new) == size


def test_each_comment_of_a_ddp_script_says_above_a_changed_line_what_breaks_without_it():
    comments = {}
    for script, text in TEXTS.items():
        for comment, below in re.findall(r"^ *(# Without .+\.)\n *(.+)$", text, re.MULTILINE):
            comments.setdefault(script, []).append(comment)
            assert script == SINGLE or below not in [line.strip() for line in code(SINGLE)]
            assert script != SINGLE or below.startswith("sampler.generator.manual_seed(")
        assert script not in SCRIPTS or text.count("#") == len(comments[script]), "none of another form"
    assert {script: len(found) for script, found in comments.items()} == {SINGLE: 1, SPAWN: 12, TORCHRUN: 12}
    assert len(set(comments[SPAWN] + comments[TORCHRUN])) == 14  # they differ in the decorator and the group


def test_the_wrapped_model_is_called_on_one_line_and_used_nowhere_else():
    for script in SPAWN, TORCHRUN:
        assert [line.strip().split(" = ")[0] for line in code(script) if "ddp_model" in line] == ["ddp_model", "loss"]
        assert ".module" not in TEXTS[script]


def test_no_collective_stands_under_a_condition():
    """A collective under `if rank == 0` waits for ever: the other ranks never come."""
    nodes = [node for script in SCRIPTS for node in ast.walk(ast.parse(TEXTS[script]))]
    conditions = [ast.unparse(node) for node in nodes if isinstance(node, ast.If)]
    assert len(conditions) == 1 + 2 * 3  # __main__; GPU, rank 0, __main__
    assert not re.search(r"dist\.|ddp_model|load_checkpoint|count_correct", "\n".join(conditions))


def importers(name):
    """The files that import a module, or one below it."""
    above, _, last = name.rpartition(".")
    forms = rf"(?:import|from) {name}\b|from {above or name} import .*\b{last}\b"
    return {path for path, text in TEXTS.items() if re.search(rf"^ *(?:{forms})", text, re.MULTILINE)}


def test_what_a_launcher_a_group_or_a_download_needs_is_imported_only_where_it_is_used():
    assert importers("common.spawn") == {SPAWN} and importers("common.torchrun") == {TORCHRUN}
    groups = {SPAWN, TORCHRUN, "common/spawn.py", "common/torchrun.py"}
    assert importers("torch.distributed") == groups >= importers("torch.multiprocessing")
    assert importers("torchvision") == {"common/data.py", "common/model.py"}
    assert not any(re.search(r"^(import|from) torchvision", text, re.MULTILINE) for text in TEXTS.values())


def test_the_scripts_use_the_names_of_the_field_and_no_branches_for_ddp():
    names = r"\b(gpu|gpu_id|net|ddp_rank|master|Trainer|(?<!torch\.)utils|helpers|snapshot|ckpt|metrics)\b"
    ways = r"if ddp|world_size > 1|\.item\(\)|barrier|device_count|rank %|except|class |lambda"
    for script in SCRIPTS:
        assert not re.search(f"{names}|{ways}", "\n".join(code(script))), script


# https://docs.pytorch.org/docs/2.4/elastic/run.html and .../stable/...: NCCL for GPUs, LOCAL_RANK chooses one.
# https://docs.pytorch.org/docs/2.4/generated/torch.nn.parallel.DistributedDataParallel.html and .../stable/...: before
# the wrapper torch.cuda.set_device; device_ids may be left out.
def test_each_line_for_gpus_has_the_form_that_pytorch_documents():
    for script, number in (SPAWN, "rank"), (TORCHRUN, 'int(os.environ["LOCAL_RANK"])'):
        lines = [line.strip() for line in code(script) if "cuda" in line or "ddp_model = " in line]
        assert lines[0] == 'device = torch.device("cuda" if torch.cuda.is_available() else "cpu")'
        assert lines[1:3] == ['if device.type == "cuda":', f"torch.cuda.set_device({number})"]
        assert '"nccl" if device.type == "cuda" else "gloo", init_method=' in lines[3]
        assert lines[4:] == ["ddp_model = DistributedDataParallel(model)"]


def test_every_file_is_python_3_10():
    paths = [*ROOT.glob("*.py"), *ROOT.glob("common/*.py"), *ROOT.glob("tests/*.py")]
    assert len(paths) > 30 and all(ast.parse(path.read_text(), feature_version=(3, 10)) for path in paths)
    assert "Python 3.10" in (ROOT / "README.md").read_text()
