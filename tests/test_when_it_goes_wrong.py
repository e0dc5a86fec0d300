"""What goes wrong in scripts with DDP, each made to happen: a test for each row of the README's table.

The rows that are not here have their tests in test_commands.py, test_lines.py, test_faults.py and test_refusals.py.
"""

import contextlib
import os
import socket
import sys
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import run as torchrun
from torch.distributed.algorithms.join import Join
from torch.distributed.constants import default_pg_nccl_timeout, default_pg_timeout
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from common.checkpoint import load_checkpoint, save_checkpoint
from tests.processes import ROOT, edited, run_command, run_ranks

LIMIT = 3  # seconds that a process waits for another here
TIMED_OUT = f"Timed out waiting {LIMIT}000ms for "  # recv, or send, operation to complete


def hasty_group():
    """A second group of all ranks, in which to wait in vain is an error after LIMIT seconds."""
    dist.barrier()
    return dist.new_group(timeout=timedelta(seconds=LIMIT))


def error_of(action):
    """The error that action() ends with, or "": no rank goes on before all have come to an end."""
    text = ""
    try:
        action()
    except (RuntimeError, ValueError, AttributeError) as error:
        text = str(error)
    dist.barrier()
    return text


# Processes that wait for each other


def test_who_waits_in_vain_waits_half_an_hour_over_gloo_and_ten_minutes_over_nccl():
    assert default_pg_timeout == timedelta(minutes=30)
    assert torchrun.config_from_args(torchrun.parse_args(["script.py"]))[0].rdzv_configs["timeout"] == 15 * 60
    assert default_pg_nccl_timeout in (timedelta(minutes=10), None)  # None: built without NCCL


def train_on_five_images(rank, *ways):
    """The error, if any, and the number of steps, with each way of sharing five images between two ranks."""
    results = []
    for way in ways:
        group = hasty_group() if way == "unequal shards" else None
        ddp_model, steps = DistributedDataParallel(torch.nn.Linear(1, 1), process_group=group), []
        sampler = DistributedSampler(range(5), drop_last=True) if way == "drop_last" else range(rank, 5, 2)

        def train():
            with Join([ddp_model]) if way == "Join" else contextlib.nullcontext():
                for batch in DataLoader(torch.arange(5.0).unsqueeze(1), sampler=sampler):
                    ddp_model(batch).sum().backward()
                    steps.append(batch)

        results.append((error_of(train), len(steps)))
    return results


def test_a_rank_with_one_batch_more_waits_for_the_others_in_vain_unless_drop_last_or_join_is_used(tmp_path):
    ways = "unequal shards", "drop_last", "Join"
    [(error, steps), *first], [*second] = run_ranks(tmp_path, train_on_five_images, *ways)
    assert TIMED_OUT in error and steps == 2 and first == [("", 2), ("", 3)] and second == [("", 2)] * 3


def sum_the_loss_on_rank_0_and_the_count_on_both(rank):
    """The loss is 1 on rank 0 and 2 on rank 1, the count is 10 and 20."""
    group, loss, count = hasty_group(), torch.tensor(1.0 + rank), torch.tensor(10.0 + 10 * rank)

    def reduce():
        if rank == 0:
            dist.all_reduce(loss, group=group)
        dist.all_reduce(count, group=group)

    return error_of(reduce), loss.item(), count.item()


def test_a_sum_under_if_rank_0_takes_the_next_sum_of_the_others_and_their_last_is_missed(tmp_path):
    """Rank 1 comes to one sum only, which becomes that of rank 0's loss and its own count."""
    (error, loss, _), (no_error, _, count) = run_ranks(tmp_path, sum_the_loss_on_rank_0_and_the_count_on_both)
    assert loss == count == 1 + 20 and no_error == "" and TIMED_OUT in error


def sum_different_sizes(rank, detail):
    group = None
    if detail:
        os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
        dist.set_debug_level_from_env()
        group = dist.new_group()
    return error_of(lambda: dist.all_reduce(torch.ones(8 if rank == 0 else 2), group=group))


def test_ranks_that_meet_in_different_collectives_abort_and_with_detail_both_are_described(tmp_path):
    with pytest.raises(AssertionError, match="collective mismatch in your code|op.preamble.length <= op.nbytes"):
        run_ranks(tmp_path, sum_different_sizes, False)
    for error in run_ranks(tmp_path, sum_different_sizes, True):
        assert error.startswith("Detected mismatch between collectives on ranks")
        assert all(word in error for word in ("Rank 0", "Rank 1", "ALLREDUCE", "TensorShape=[8]", "TensorShape=[2]"))


def evaluate_on_rank_0(rank):
    """The errors with the model and with the wrapper."""
    model, group, errors = torch.nn.BatchNorm1d(3), hasty_group(), []
    ddp_model = DistributedDataParallel(model, process_group=group)
    for called, waited_for in (model, None), (ddp_model, group):

        def evaluate():
            if rank == 0:
                with torch.no_grad():
                    called(torch.ones(2, 3))
            dist.barrier(waited_for)

        errors.append(error_of(evaluate))
    return errors


def test_a_wrapper_with_batchnorm_called_on_rank_0_alone_leaves_all_waiting_and_the_model_does_not(tmp_path):
    with_model, with_wrapper = zip(*run_ranks(tmp_path, evaluate_on_rank_0))
    assert with_model == ("", "")
    assert "" not in with_wrapper and any(TIMED_OUT in error for error in with_wrapper), with_wrapper


def leave_before_the_sum(rank):
    """Reset, where something that was sent is still unread."""
    if rank == 0:
        with pytest.raises(RuntimeError, match="Connection (closed|reset) by peer"):
            dist.all_reduce(torch.zeros(1))


def test_the_others_say_connection_closed_when_a_process_has_ended(tmp_path):
    assert run_ranks(tmp_path, leave_before_the_sum) == [None, None]


def start_again_before_rank_0(rank, path):
    """After a first attempt: rank 1's error while rank 0 is not back, in the same store and under a prefix."""
    store, errors = dist.FileStore(path, 2), []
    first_attempt = dist.ProcessGroupGloo(store, rank, 2)
    dist.barrier()
    del first_attempt  # which closes its sockets, as the end of the process does
    dist.barrier()
    for store_of_attempt in store, dist.PrefixStore("1", store):
        errors.append(error_of(lambda: rank and dist.ProcessGroupGloo(store_of_attempt, 1, 2, timedelta(seconds=0.5))))
    return errors


def test_in_the_same_store_a_second_attempt_calls_the_dead_and_under_a_prefix_it_waits_for_the_living(tmp_path):
    _, (same_store, prefix) = run_ranks(tmp_path, start_again_before_rank_0, str(tmp_path / "store"))
    assert same_store.startswith("Gloo connectFullMesh failed with")
    assert prefix == "Wait timeout"  # for an address


# Processes that do not start


def test_without_torchrun_the_first_variable_that_is_missing_is_named():
    for missing, given in ("RANK", {"MASTER_ADDR": "127.0.0.1"}), ("MASTER_ADDR", {"RANK": "0", "WORLD_SIZE": "2"}):
        expected = pytest.raises(ValueError, match=f"environment variable {missing} expected, but not set")
        with mock.patch.dict(os.environ, given, clear=True), expected:
            dist.init_process_group("gloo")


def test_one_process_of_two_waits_for_the_other():
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        for rank, port, error in (
            (0, 0, r"waiting for clients\. 1/2 clients joined"),
            (1, closed.getsockname()[1], "The client socket has timed out"),
        ):
            with pytest.raises(dist.DistError, match=error):
                dist.TCPStore("127.0.0.1", port, world_size=2, is_master=rank == 0, timeout=timedelta(seconds=1))


def test_a_script_that_spawns_without_a_main_guard_cannot_start(tmp_path):
    edited(tmp_path, "ddp_mp_spawn.py", ('if __name__ == "__main__":\n    main()', "main()"))
    (tmp_path / "common").symlink_to(ROOT / "common")
    result = run_command(sys.executable, "ddp_mp_spawn.py", "--nproc", "1", "--epochs", "1", cwd=tmp_path)
    assert result.returncode == 1 and "An attempt has been made to start a new process before the" in result.stderr


def test_torchrun_counts_the_gpus_where_the_number_of_processes_is_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert torchrun.config_from_args(torchrun.parse_args(["--nproc_per_node=gpu", "script.py"]))[0].nproc_per_node == 3


def test_torchrun_names_the_signal_that_ended_a_process_and_has_no_traceback_that_nobody_recorded(tmp_path):
    killed, failed = (ProcessFailure(0, 123, status, str(tmp_path / "no_file")) for status in (-9, 1))
    assert killed.message == "Signal 9 (SIGKILL) received by PID 123"
    assert failed.message.startswith("To enable traceback see")


# The wrapper


def with_spare_layer():
    """A model of two layers, of which forward uses one."""
    model = torch.nn.ModuleDict({"used": torch.nn.Linear(2, 2), "spare": torch.nn.Linear(2, 2)})
    model.forward = model["used"].forward
    return model


def train_with_spare_layer(rank):
    """The error, if any, and the number of steps: plain, and with the two cures."""
    results = []
    for way in "plain", "find_unused_parameters", "frozen":
        model, steps = with_spare_layer(), []
        model["spare"].requires_grad_(way != "frozen")
        ddp_model = DistributedDataParallel(model, find_unused_parameters=way == "find_unused_parameters")

        def train():
            for step in range(3):
                ddp_model(torch.ones(1, 2)).sum().backward()
                steps.append(step)

        results.append((error_of(train), len(steps)))
    return results


def test_a_parameter_without_a_gradient_is_an_error_in_the_second_step(tmp_path):
    for (error, steps), *cured in run_ranks(tmp_path, train_with_spare_layer):
        assert error.startswith("Expected to have finished reduction in the prior iteration") and steps == 1
        assert cured == [("", 3)] * 2


def errors_of_the_wrapper(rank):
    model = with_spare_layer()
    ddp_model, same = DistributedDataParallel(model), model.state_dict()
    loads = (model, same), (model, ddp_model.state_dict()), (ddp_model, same)
    return [error_of(lambda: module.load_state_dict(state)) for module, state in loads]


def test_weights_saved_from_the_wrapper_have_other_names_than_those_of_the_model(tmp_path):
    [[no_error, *errors]] = run_ranks(tmp_path, errors_of_the_wrapper, nproc=1)
    assert no_error == ""
    for error, missing, unexpected in zip(errors, ("", "module."), ("module.", ""), strict=True):
        assert f'Missing key(s) in state_dict: "{missing}used.weight"' in error
        assert f'Unexpected key(s) in state_dict: "{unexpected}used.weight"' in error


def test_a_file_names_the_gpu_that_its_weights_were_on_and_map_location_overrules_it(tmp_path, monkeypatch):
    options = {"dataset": "digits", "model": "cnn", "batch_size": 48, "lr": 0.02, "seed": 0, "epochs": 10}
    model, path = torch.nn.Linear(2, 2), tmp_path / "model.pt"
    named = {"model": model, "optimizer": torch.optim.SGD(model.parameters())}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with monkeypatch.context() as on_gpu:
        on_gpu.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
        save_checkpoint(path, options, 0, **named)
    with pytest.raises(RuntimeError, match="Attempting to deserialize object on a CUDA device"):
        torch.load(path)
    assert load_checkpoint(path, options, **named) == 1
