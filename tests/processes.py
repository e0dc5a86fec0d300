"""The one place where tests and tools start processes: a shipped script, a function on N ranks, or any command.

Scripts and functions start in milliseconds, from a fork server that has torch loaded. `run_script` does what torchrun
does: it hosts the store, sets the variables, and ends all processes when one fails. Each process writes down what it
saw. Nothing that a script does is replaced, but for mp.spawn, which forks its children where it would start
them anew, and in float64 the loader, which makes floating images float64.
"""

import contextlib
import functools
import hashlib
import importlib.util
import json
import multiprocessing
import multiprocessing.connection
import os
import re
import signal
import subprocess
import sys
import time
import traceback
import uuid
import weakref
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ["single_gpu.py", "ddp_mp_spawn.py", "ddp_torchrun.py"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
EPOCH = r"epoch +\d+/\d+  loss (\d\.\d{6})  test accuracy (\d\d\.\d\d%)  [\d,]+ images/s  eta \d+ s"
SECONDS = 120  # no run of a test takes a tenth of this

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["tests.preload"])


# Commands, as a person types them


@contextlib.contextmanager
def started(*command, environment=None, **popen):
    """Start a command, and end it in the end, with all processes that it has started.

    Args:
        environment (dict): variables to add.
        popen: for subprocess.Popen; what is printed is piped unless stdout and stderr say otherwise.
    Yields:
        subprocess.Popen: with `family`, a call that returns its living processes: {pid: command line}.
    """
    mark = uuid.uuid4().hex
    environment = {**os.environ, **(environment or {}), "STARTED_BY_TEST": mark}
    pipes = {"cwd": ROOT, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen([*map(str, command)], env=environment, start_new_session=True, **pipes | popen)
    process.family = lambda: _marked(mark)
    try:
        yield process
    finally:
        while living := process.family():  # one that is about to start another included
            for pid in living:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.1)
        process.communicate()


def _marked(mark):
    """The living processes that have inherited a mark, whoever is their parent by now."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark.encode() in (folder / "environ").read_bytes() and ") Z " not in (folder / "stat").read_text():
                found[int(folder.name)] = (folder / "cmdline").read_bytes().decode().replace("\0", " ")
    return found


def run_command(*command, text=None, seconds=SECONDS, **how):
    """Run a command to its end, see started().

    Args:
        text (str): what it reads from standard input.
    Returns:
        subprocess.CompletedProcess
    """
    with started(*command, stdin=subprocess.PIPE if text else subprocess.DEVNULL, **how) as process:
        stdout, stderr = process.communicate(text, timeout=seconds)
        return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


def wait_for(condition, seconds=SECONDS, pause=0.02):
    """The first true value of condition(), or what it is after so many seconds."""
    end = time.monotonic() + seconds
    while not (value := condition()) and time.monotonic() < end:
        time.sleep(pause)
    return value


# Scripts and functions, from the fork server


def run_script(*command, **how):
    """Run one script; see run_scripts()."""
    return run_scripts([command], **how)[0]


def run_scripts(commands, nproc=1, float64=False, environment=None, seconds=SECONDS):
    """Run scripts at the same time, each with nproc processes, its output and records in a new folder below its folder.

    Args:
        commands (list of tuples): of each its folder, script (a shipped one's name, or the path of an edited copy) and
            command-line options; --nproc is added for ddp_mp_spawn.py.
        float64 (bool): let float64 be torch's default type.
    Returns:
        list of SimpleNamespace: status (first non-zero exit status or 0), stdout, stderr; an item an epoch: losses and
        accuracies, as rank 0 was about to print them; of each rank, in order: totals, weights (a digest) after each
        epoch, batch (the indices of each training batch), threads (torch's), group (whether one was left open).
    """
    runs, stores = [], []
    for folder, script, *argv in commands:
        path, argv, variables = ROOT / script, [str(word) for word in argv], [{}]
        folder = Path(folder) / f"run{len(list(Path(folder).glob('run*')))}"
        folder.mkdir(parents=True)
        if "spawn" in path.name:
            argv += ["--nproc", str(nproc)]
        elif "torchrun" in path.name:
            stores.append(dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
            variables = [torchrun_variables(rank, nproc, stores[-1].port) for rank in range(nproc)]
        arguments = [(path, argv, each | (environment or {}), float64, folder) for each in variables]
        runs.append((folder, [context.Process(target=_script, args=each) for each in arguments]))
    with _started([process for _, processes in runs for process in processes]):
        return [_result(folder, nproc, _wait(processes, seconds, folder / "stderr")) for folder, processes in runs]


def _result(folder, nproc, status):
    files = [folder / f"rank{rank}" for rank in range(nproc) if (folder / f"rank{rank}").exists()]
    notes = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]

    def noted(name):
        return [[note[name] for note in rank if name in note] for rank in notes]

    totals = [each for rank in noted("totals")[:1] for each in rank]
    return SimpleNamespace(
        status=status,
        stdout=(folder / "stdout").read_text(),
        stderr=(folder / "stderr").read_text(),
        losses=[loss_sum / images for loss_sum, images, _, _ in totals],
        accuracies=[correct / tested for _, _, correct, tested in totals],
        **{name: noted(name) for name in ("totals", "weights", "batch", "threads", "group")},
    )


def run_ranks(folder, function, *args, nproc=2, seconds=SECONDS):
    """Call function(rank, *args) in nproc processes that form a gloo group.

    Returns:
        list: what each rank returned.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    results = [Path(folder) / f"result{rank}.pt" for rank in range(nproc)]
    arguments = [(function, rank, nproc, store.port, args, result) for rank, result in enumerate(results)]
    with _started([context.Process(target=_rank, args=each) for each in arguments]) as processes:
        stderr = Path(folder) / "stderr"
        assert _wait(processes, seconds, stderr) == 0, stderr.read_text()
    return [torch.load(result, weights_only=True) for result in results]


def in_process(function, stderr, *args, nobody=False):
    """Call a function in a process of its own, in the folder of stderr (a path), perhaps as nobody, not root.

    Returns:
        tuple: the exit status, and what was written to stderr.
    """
    process = context.Process(target=_in_process, args=(function, stderr, args, nobody), daemon=True)
    process.start()
    process.join(SECONDS)
    process.kill()
    return process.exitcode, stderr.read_text()


def _in_process(function, stderr, args, nobody):
    sys.stderr = stderr.open("w")
    os.chdir(stderr.parent)
    if nobody and os.geteuid() == 0:
        import encodings.hex_codec  # noqa: F401  (torchvision uses it, and where Python is may be closed to nobody)

        import torchvision  # noqa: F401

        os.setuid(65534)
    function(*args)


def torchrun_variables(rank, nproc, port):
    """The variables that torchrun gives to process `rank` of nproc on one machine."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": nproc, "LOCAL_WORLD_SIZE": nproc, "MASTER_PORT": port}
    store = {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    return {name: str(number) for name, number in numbers.items()} | store


def edited(folder, script, *edits):
    """A copy of a script, a shipped one's name or a path, with (old, new) replaced, each of which occurs once."""
    source = (ROOT / script).read_text()
    for old, new in edits:
        assert source.count(old) == 1, f"{old!r} occurs {source.count(old)} times in {script}"
        source = source.replace(old, new)
    path = Path(folder) / Path(script).name
    path.write_text(source)
    return path


def epochs_printed(text):
    """(loss, test accuracy) of each epoch in what a run has printed."""
    return [(float(loss), float(accuracy[:-1])) for loss, accuracy in re.findall(EPOCH, text)]


@contextlib.contextmanager
def _started(processes):
    """Start processes, and whatever happens leave none of them: each leads a process group named after its id."""
    try:
        for process in processes:
            process.start()
        yield processes
    finally:
        _end(process for process in processes if process.pid)


def _end(processes):
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.join()


def _wait(processes, seconds, stderr):
    """Wait for processes, and end those that are left at the first failure: the first exit status that is not 0."""
    end, left = time.monotonic() + seconds, list(processes)
    while left:
        ready = multiprocessing.connection.wait([process.sentinel for process in left], max(0, end - time.monotonic()))
        if not ready:
            raise TimeoutError(f"not finished after {seconds} seconds:\n{stderr.read_text()}")
        for process in [process for process in left if process.sentinel in ready]:
            process.join()
            left.remove(process)
            if process.exitcode:
                _end(left)
                return process.exitcode
    return 0


def _lead_group(folder):
    """Lead a process group, and write into the folder what it prints."""
    os.setpgid(0, 0)
    for number, name in (1, "stdout"), (2, "stderr"):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)


def _fork(function, args, nprocs):
    """mp.spawn, but the children are forked, and wait for the last: none is forked while another is at work."""
    complete = multiprocessing.get_context("fork").Event()
    arguments = (complete, function, args)
    children = torch.multiprocessing.start_processes(_child, arguments, nprocs, join=False, start_method="fork")
    complete.set()
    while not children.join():
        pass


def _child(rank, complete, function, args):
    complete.wait()
    function(rank, *args)


def _script(path, argv, environment, float64, folder):
    """In the process of a run: load the script from its file, note what it does, and call its main."""
    _lead_group(folder)
    os.environ.update(environment)
    if float64:
        torch.set_default_dtype(torch.float64)
    torch.multiprocessing.spawn = _fork
    spec = importlib.util.spec_from_file_location(path.stem, path)
    script = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    if float64:
        script.DataLoader = _InDouble
    _take_notes(script, folder)
    script.main(argv)
    if path.stem != "ddp_mp_spawn":
        _note(folder, group=dist.is_initialized())


class _InDouble(DataLoader):
    """The loader, for the reader's own images, which may be float32."""

    def __iter__(self):
        for images, labels in super().__iter__():
            yield images.double() if images.is_floating_point() else images, labels


def _take_notes(script, folder):
    from common.data import ImageSet

    train, count_correct, report_epoch, gather = (
        script.train, script.count_correct, script.report_epoch, ImageSet.__getitems__
    )  # fmt: skip
    training = []  # the length of the training set tells its batches from those of the test set

    def noted_train(*args):
        try:
            train(*args)
            _note(folder, threads=torch.get_num_threads())
        finally:
            weakref.finalize._exitfunc()  # which a process that was forked would leave out

    def noted_count(model, loader, device):
        parameters = b"".join(p.detach().cpu().numpy().tobytes() for p in model.state_dict().values())
        _note(folder, weights=hashlib.sha256(parameters).hexdigest())
        return count_correct(model, loader, device)

    def noted_report(totals, *args):
        _note(folder, totals=totals.tolist())
        report_epoch(totals, *args)

    def noted_gather(self, indices):
        training.append(len(self))
        if len(self) == max(training):
            _note(folder, batch=indices)
        return gather(self, indices)

    script.count_correct, script.report_epoch, ImageSet.__getitems__ = noted_count, noted_report, noted_gather
    script.train = functools.wraps(train)(noted_train)


def _note(folder, **record):
    rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", 0))
    with open(folder / f"rank{rank}", "a") as file:
        file.write(json.dumps(record) + "\n")


def _rank(function, rank, nproc, port, args, path):
    _lead_group(path.parent)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.TCPStore("127.0.0.1", port), rank=rank, world_size=nproc)
    try:
        result = function(rank, *args)
    except BaseException:
        traceback.print_exc()
        raise
    torch.save(result, path)  # and leave the group open: closing it can hang in PyTorch 2.4 (gloo awaits the GIL)
