"""Stand-ins save what the kernels of a GPU save."""

import importlib
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from nanotrain.comm.device import HostCopy
from nanotrain.comm.recorder import Recorder
from nanotrain.config.load import load
from nanotrain.dry_run.stand_ins import on_meta, without_compiler
from nanotrain.plan.plan import plan_run


def plan_of(flags: str, world_size: int):
    return plan_run(
        load(f"+config=tiny_moe --mock-data {flags}".split()).config, world_size, rank=0
    )


def test_a_norm_saves_its_input_and_a_number_per_row() -> None:
    x = torch.empty(64, 128, device="meta", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.empty(128, device="meta", dtype=torch.bfloat16, requires_grad=True)
    with on_meta(plan_of("", 1)), Recorder() as recorder:
        out = F.rms_norm(x, (128,), weight, 1e-6)
        assert recorder.allocated == out.nbytes + 512
        out.backward(torch.empty_like(out))
    assert x.grad is not None and weight.grad is not None and weight.grad.shape == (128,)


def test_attention_saves_the_log_sum_exp_and_takes_grouped_heads() -> None:
    query, key, value = (
        torch.empty(2, heads, 128, 64, device="meta", dtype=torch.bfloat16, requires_grad=True)
        for heads in (8, 2, 2)
    )
    with on_meta(plan_of("", 1)), Recorder() as recorder:
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        assert 0 < recorder.allocated - out.nbytes - 2 * 8 * 128 * 4 <= 3 * 512, (
            "state of the random generator"
        )
        out.backward(torch.empty_like(out))
    assert key.grad is not None and key.grad.shape == key.shape


def test_every_expert_gets_equally_many_tokens() -> None:
    from nanotrain.parallel.ep import token_dispatcher

    plan = plan_of("--expert-model-parallel-size 4 --micro-batch-size 1 --global-batch-size 4", 4)
    with on_meta(plan):
        counts, ep = (
            torch.empty(2, 8, device="meta"),
            SimpleNamespace(size=4, index=0, parent=None),
        )
        (numbers,) = token_dispatcher.on_host(HostCopy(counts), [(counts, ep)])
    assert plan.shape.moe is not None
    pairs, size = plan.config.data.seq_length * plan.shape.moe.router_topk, 8 // 4
    assert [sum(numbers[start : start + size]) for start in range(0, len(numbers), size)] == [
        pairs // 4
    ] * 8


def test_no_compiler_is_imported_to_leave_functions_out_of_graphs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "torch._dynamo", raising=False)
    monkeypatch.delitem(vars(torch), "_dynamo", raising=False)
    with without_compiler():
        stand_in: Any = importlib.import_module("torch._dynamo")
        assert stand_in.disable(rows_of) is rows_of
    assert "torch._dynamo" not in sys.modules
    assert "_dynamo" not in vars(torch)


def rows_of() -> None:
    """A function to leave out."""
