"""A failed allocation is one message with a cure, on the rank that has it, at once."""

import pytest
import torch

from nanotrain.errors import LocalFault
from nanotrain.train import main as entry
from nanotrain.train import trainer
from nanotrain.watch.out_of_memory import explaining_memory_errors
from tests.train.small_run import arguments


def allocate_too_much(*_args: object, **_options: object) -> None:
    torch.empty(2**52)


def raise_on_a_gpu() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nSee documentation")


@pytest.mark.parametrize(
    ("fail", "why"),
    [
        (allocate_too_much, r"you tried to allocate \d+ bytes"),
        (raise_on_a_gpu, r"CUDA out of memory. Tried to allocate 2.00 GiB\.;"),
        (lambda: bytearray(2**60), "MemoryError"),
    ],
)
def test_the_allocators_of_host_and_gpu_and_of_python(fail, why):
    expected = f"^rank 3 .dp3. ran out of memory: .*{why}.*--micro-batch-size"
    with pytest.raises(LocalFault, match=expected) as raised, explaining_memory_errors("rank 3 (dp3)"):
        fail()
    assert "\n" not in str(raised.value)


def test_another_error_keeps_its_traceback():
    with pytest.raises(RuntimeError, match="sizes differ") as raised, explaining_memory_errors("rank 0"):
        raise RuntimeError("sizes differ")
    assert not isinstance(raised.value, LocalFault)


def test_a_step_without_memory_ends_the_run_with_one_message(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(trainer, "train_step", allocate_too_much)
    assert entry.main(arguments(tmp_path)) == 2
    err = capfd.readouterr().err
    assert err.count("error: rank 0 ran out of memory: ") == 1 and "Traceback" not in err


def test_a_rank_that_is_not_the_first_prints_it_without_waiting(tmp_path, capfd, monkeypatch):
    def fail(*_args):
        raise LocalFault("rank 1 ran out of memory")

    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(entry.time, "sleep", lambda seconds: pytest.fail(f"it waits for {seconds} s"))
    monkeypatch.setattr(entry, "train", fail)
    assert entry.main(arguments(tmp_path)) == 2
    assert capfd.readouterr().err == "error: rank 1 ran out of memory\n"
