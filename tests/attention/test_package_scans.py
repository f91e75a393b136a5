"""Packages are called with what they document: stand-ins compute their formulas token by token."""

import inspect
import sys
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from nanotrain.attention.package_scans import fla_delta_rule, fla_ssd, mamba_ssd
from nanotrain.attention.scan_inputs import DeltaInputs
from tests.attention.delta_inputs import (
    BATCH,
    HEADS,
    KEY_DIM,
    VALUE_DIM,
    random_inputs,
    recurrence,
    ssd_recurrence,
    tensors,
)

KINDS = pytest.mark.parametrize("by_channel", [False, True], ids=["by head", "by channel"])
DOCUMENTS = pytest.mark.parametrize("documents", [False, True], ids=["one document", "documents"])


def assert_same(computed: tuple[Tensor, ...], expected: tuple[Tensor, ...], of: Any) -> None:
    """Assert that results and gradients are the same."""
    for ours, theirs in zip(computed, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
    weights = [torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view(x.shape) for x in expected]
    found = torch.autograd.grad(computed, of, weights, retain_graph=True)
    exact = torch.autograd.grad(expected, of, weights, retain_graph=True)
    for ours, theirs in zip(found, exact, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


def install(monkeypatch: pytest.MonkeyPatch, module: str, **functions: Any) -> None:
    """Stand in for a module and the packages that hold it."""
    parents = module.split(".")[:-1]
    for i in range(len(parents)):
        name = ".".join(parents[: i + 1])
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module, SimpleNamespace(**functions))


def packed(rule: Any, inputs: DeltaInputs, initial: Tensor | None, options: Any) -> Any:
    """A rule of fla over packed documents."""
    assert options.pop("output_final_state")
    if not options:
        return rule(inputs, initial)
    borders = options["cu_seqlens"].tolist()
    assert borders == options["cu_seqlens_cpu"].tolist()
    assert initial is not None
    parts = []
    for i in range(len(borders) - 1):
        document = slice(*borders[i : i + 2])
        part = inputs.map(lambda x, document=document: x[:, document])
        parts.append(rule(part, initial[i : i + 1]))
    return torch.cat([out for out, _ in parts], dim=1), torch.cat([state for _, state in parts])


def their_delta_rule(*given: Tensor, initial_state: Tensor, **options: Any) -> Any:
    """chunk_gated_delta_rule and chunk_kda."""
    assert options.pop("use_qk_l2norm_in_kernel")
    q, k, v, g, beta = given
    inputs = DeltaInputs(q, k, v, g if g.dim() == 4 else g[..., None], beta[..., None])
    return packed(recurrence, inputs, initial_state, options)


def their_simple_gla(*given: Tensor, initial_state: Tensor, **options: Any) -> Any:
    """chunk_simple_gla: S = exp(g) S + k v^T, o = scale q S."""
    assert options.pop("scale") == 1.0
    q, k, v, g = given
    assert q.shape[2] == k.shape[2] == v.shape[2], "it has no groups of heads"
    inputs = DeltaInputs(q, k, v, g[..., None], torch.ones_like(g)[..., None])

    def rule(inputs: DeltaInputs, state: Tensor | None) -> tuple[Tensor, Tensor]:
        out, final = ssd_recurrence(inputs, None if state is None else state.mT)
        return out, final.mT

    return packed(rule, inputs, initial_state, options)


def their_mamba(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int, **options: Any
) -> Any:
    """mamba_chunk_scan_combined; sequence 0 of seq_idx continues the initial states."""
    assert chunk_size == 256 and options.pop("return_final_states")
    assert A.shape == (x.shape[2],)
    index = options.pop("seq_idx")
    starts = None
    if index is not None:
        assert index.dtype == torch.int32
        starts = index.diff(dim=1, prepend=index.new_zeros(len(index), 1)) > 0
    inputs = DeltaInputs(C, B, x, (dt * A)[..., None], dt[..., None], starts)
    return ssd_recurrence(inputs, options.pop("initial_states"))


def initial_state(*shape: int) -> Tensor:
    return torch.randn(BATCH, HEADS, *shape, dtype=torch.float64, requires_grad=True)


@KINDS
@DOCUMENTS
def test_fla_computes_delta_rules(
    documents: bool, by_channel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, "fla.ops.kda", chunk_kda=their_delta_rule)
    install(monkeypatch, "fla.ops.gated_delta_rule", chunk_gated_delta_rule=their_delta_rule)
    inputs = random_inputs(30, by_channel=by_channel, documents=documents)
    state = initial_state(KEY_DIM, VALUE_DIM)
    of = (*tensors(inputs), state)
    assert_same(fla_delta_rule(inputs, state), recurrence(inputs, state), of)
    assert_same(fla_delta_rule(inputs, None), recurrence(inputs), tensors(inputs))


@DOCUMENTS
def test_simple_gla_computes_mamba2(documents: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "fla.ops.simple_gla", chunk_simple_gla=their_simple_gla)
    inputs = random_inputs(30, by_channel=False, documents=documents)
    state = initial_state(VALUE_DIM, KEY_DIM)
    of = (*tensors(inputs), state)
    assert_same(fla_ssd(inputs, state), ssd_recurrence(inputs, state), of)
    assert_same(fla_ssd(inputs, None), ssd_recurrence(inputs), tensors(inputs))


@DOCUMENTS
def test_mamba_ssm_computes_mamba2(documents: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    module = "mamba_ssm.ops.triton.ssd_combined"
    install(monkeypatch, module, mamba_chunk_scan_combined=their_mamba)
    inputs = random_inputs(30, by_channel=False, documents=documents)
    A = (-torch.rand(HEADS, dtype=torch.float64) - 0.5).requires_grad_()
    state = initial_state(VALUE_DIM, KEY_DIM)
    given = (inputs.query, inputs.key, inputs.value)
    decay = inputs.beta * A[:, None]
    inputs = DeltaInputs(*given, decay, inputs.beta, inputs.starts, A)
    of = (*given, inputs.beta, A, state)
    assert_same(mamba_ssd(inputs, state), ssd_recurrence(inputs, state), of)
    assert_same(mamba_ssd(inputs, None), ssd_recurrence(inputs), of[:-1])


# the module and function of each call, and its arguments in order and by name
CALLS = [
    ("fla.ops.kda", "chunk_kda", "q k v g beta", "use_qk_l2norm_in_kernel"),
    ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule", "q k v g beta", "cu_seqlens_cpu"),
    ("fla.ops.simple_gla", "chunk_simple_gla", "q k v g", "scale cu_seqlens_cpu"),
    (
        "mamba_ssm.ops.triton.ssd_combined",
        "mamba_chunk_scan_combined",
        "x dt A B C chunk_size",
        "initial_states seq_idx return_final_states",
    ),
    ("causal_conv1d", "causal_conv1d_fn", "x weight bias", "seq_idx activation"),
]


@pytest.mark.parametrize(("module", "name", "ordered", "named"), CALLS)
def test_installed_packages_have_the_arguments(
    module: str, name: str, ordered: str, named: str
) -> None:
    if find_spec(module.partition(".")[0]) is None:
        pytest.skip(f"{module} is not installed")
    function = getattr(import_module(module), name)
    parameters = list(inspect.signature(inspect.unwrap(function)).parameters)
    assert parameters[: len(ordered.split())] == ordered.split()
    assert {*named.split()} <= {*parameters}
    if module.startswith("fla"):
        assert {"initial_state", "output_final_state", "cu_seqlens"} <= {*parameters}
