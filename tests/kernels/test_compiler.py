"""What a machine without a compiler says, and the forms that run there."""

from subprocess import CalledProcessError
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nanotrain.kernels import compiler, triton_softmax
from nanotrain.kernels.compiler import MAX_REASON, inductor_fault, triton_fault
from nanotrain.parallel.tp import loss


def test_a_failed_command_is_a_reason_of_one_short_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Any) -> None:
        raise CalledProcessError(1, ["/bin/false", "cuda_utils.c", *["-l:libcuda.so.1"] * 99])

    monkeypatch.setattr(compiler, "find_spec", lambda name: name)
    monkeypatch.setattr(compiler.torch, "ones", lambda *size, device: None)
    monkeypatch.setattr(triton_softmax, "row_logsumexp", fail)
    reason = triton_fault.__wrapped__()
    assert (
        reason.startswith("CalledProcessError: Command '['/bin/false', 'cuda_utils.c'")
        and len(reason) == MAX_REASON
    )
    monkeypatch.setattr(triton_softmax, "row_logsumexp", torch.zeros)
    monkeypatch.setattr(compiler.torch, "ones", lambda *size, device: 1)
    assert triton_fault.__wrapped__() == ""
    monkeypatch.setattr(compiler, "find_spec", lambda name: None)
    assert triton_fault.__wrapped__() == "the package triton is not installed"


def test_the_loss_takes_torch_s_operators_where_triton_cannot_compile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logits: Any = SimpleNamespace(is_cuda=True, dtype=torch.bfloat16)
    for name in ("_softmax_gradient_by_torch", "_softmax_gradient_by_triton"):
        monkeypatch.setattr(loss, name, lambda logits, name=name, **_: name)
    for fault, expected in (
        ("", "_softmax_gradient_by_triton"),
        ("no gcc", "_softmax_gradient_by_torch"),
    ):
        monkeypatch.setattr(compiler, "triton_fault", lambda fault=fault: fault)
        assert loss.softmax_gradient(logits, column=None, local_mask=None, combine=None) == expected


def test_inductor_names_the_compiler_that_it_lacks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    from torch._inductor import config

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    with config.patch({"cpp.cxx": ("/bin/false",)}):
        assert "No working C++ compiler found" in inductor_fault.__wrapped__("cpu")
