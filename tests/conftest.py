"""Run the files of the suite beside each other, in a few processes: most tests wait for processes of their own.

One file alone, and everything with --pdb or -s, runs as pytest runs it by itself.
"""

import contextlib
import itertools
import multiprocessing
import multiprocessing.connection
import os
import signal
from multiprocessing import forkserver

import torch

WORKERS = 3  # keep two cores busy
os.environ["OMP_WAIT_POLICY"] = "passive"  # a thread that waits for others leaves its core to another run
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
os.environ.pop("PYTHONUNBUFFERED", None)  # or a line that was not flushed would be seen at once all the same
GPUS = torch.cuda.device_count()
# For the tests of GPUs, in which float32 is not rounded to TF32. All others run on the CPU, over gloo.
WITH_GPUS = {**os.environ, "NVIDIA_TF32_OVERRIDE": "0", "PYTHONPATH": os.path.dirname(os.path.dirname(__file__))}
os.environ["CUDA_VISIBLE_DEVICES"] = ""

context = multiprocessing.get_context("fork")


def pytest_runtestloop(session):
    files = [list(items) for _, items in itertools.groupby(session.items, lambda item: item.path)]
    option, hook = session.config.option, session.config.hook
    if len(files) < 2 or option.usepdb or option.capture == "no" or option.collectonly or session.testsfailed:
        return None
    import tests.preload  # noqa: F401  (once for all workers, like the fork server of their runs)

    forkserver.ensure_running()
    workers = {}
    try:
        for _ in range(WORKERS):
            here, there = context.Pipe()
            workers[here] = context.Process(target=run_files, args=(there, workers, session, files))
            workers[here].start()
            there.close()
        waiting, idle = iter(range(len(files))), list(workers)
        while workers:
            for worker in idle:
                worker.send(None if session.shouldfail else next(waiting, None))
            idle = multiprocessing.connection.wait(workers)
            for worker in list(idle):
                reports = worker.recv()
                if reports is None:
                    idle.remove(worker)
                    workers.pop(worker).join()
                for data in reports or []:
                    report = hook.pytest_report_from_serializable(config=session.config, data=data)
                    hook.pytest_runtest_logreport(report=report)
    finally:
        for process in workers.values():
            process.join(10)  # it was interrupted with this one
            process.kill()
    if session.shouldfail:
        raise session.Failed(session.shouldfail)
    return True


def run_files(connection, others, session, files):
    """In a worker: run each file whose number arrives, and send what is reported of its tests; None at the end."""
    for other in others:
        other.close()  # were its ends open here too, no worker would notice that the first process was killed
    plugins, hook, reports = session.config.pluginmanager, session.config.hook, []
    # The fork server runs, but is no child of this process, which would take it for dead and start another.
    forkserver._forkserver.ensure_running = lambda: None

    class Collector:
        def pytest_runtest_logreport(self, report):
            reports.append(hook.pytest_report_to_serializable(config=session.config, report=report))

    plugins.unregister(name="terminalreporter")
    plugins.register(Collector())
    with contextlib.suppress(EOFError, ConnectionError):  # the first process was killed
        for number in iter(connection.recv, None):
            items = files[number]
            for item, next_item in zip(items, [*items[1:], None]):
                hook.pytest_runtest_protocol(item=item, nextitem=next_item)
            connection.send(reports)
            reports.clear()
        connection.send(None)
