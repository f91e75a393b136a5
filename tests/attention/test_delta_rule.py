"""The chunked gated delta rule is the recurrence, whatever the chunks, documents and decays, in
both directions.
"""

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile

from nanotrain.attention.delta_rule import delta_rule, span_map
from nanotrain.attention.scan_inputs import DeltaInputs
from nanotrain.config.layer_kinds import LinearAttentionConfig
from nanotrain.config.model import ModelConfig
from nanotrain.spec.kinds import MIXERS
from nanotrain.spec.layer_sizes import LayerSizes
from nanotrain.spec.shape import ModelShape
from tests.attention.delta_inputs import BATCH, KEY_DIM, random_inputs, recurrence, tensors
from tests.attention.fp64_transformers import modeling_in_fp64

KINDS = pytest.mark.parametrize("by_channel", [False, True], ids=["by head", "by channel"])


def gradients(outputs: tuple[Tensor, ...], inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Of a sum with fixed random weights."""
    draw = torch.Generator().manual_seed(1)
    weights = [
        torch.randn(x.shape, generator=draw, dtype=torch.float64).to(x.dtype) for x in outputs
    ]
    return torch.autograd.grad(outputs, inputs, weights)


def assert_close(
    computed: tuple[Tensor, ...], expected: tuple[Tensor, ...], tolerance: float = 1e-10
) -> None:
    for ours, theirs in zip(computed, expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs.double(), rtol=tolerance, atol=tolerance)


@KINDS
@pytest.mark.parametrize("documents", [False, True], ids=["one document", "documents"])
@pytest.mark.parametrize("chunk_size", [1, 4, 16, 64])
def test_chunks_are_the_recurrence_in_both_directions(
    chunk_size: int, documents: bool, by_channel: bool
) -> None:
    inputs = random_inputs(45, by_channel=by_channel, documents=documents)
    heads = inputs.value.shape[2]
    initial = torch.randn(
        BATCH, heads, KEY_DIM, inputs.value.shape[3], dtype=torch.float64, requires_grad=True
    )
    variables = (*tensors(inputs), initial)
    expected, computed = (
        recurrence(inputs, initial),
        delta_rule(inputs, initial, chunk_size=chunk_size),
    )
    assert_close(computed, expected)
    assert_close(gradients(computed, variables), gradients(expected, variables))


@KINDS
def test_a_span_is_an_affine_map_of_the_state(by_channel: bool) -> None:
    inputs = random_inputs(21, by_channel=by_channel)
    states = torch.randn(
        3, BATCH, inputs.value.shape[2], KEY_DIM, inputs.value.shape[3], dtype=torch.float64
    )
    transition, offset = span_map(inputs, chunk_size=8)
    for state in states:
        assert_close((transition @ state + offset,), (recurrence(inputs, state)[1],))
    variables = tensors(inputs)[1:]  # a state does not depend on queries
    expected = recurrence(inputs, states[0])[1]
    assert_close(
        gradients((transition @ states[0] + offset,), variables), gradients((expected,), variables)
    )
    inputs = DeltaInputs(*tensors(inputs), torch.arange(21).expand(BATCH, -1) == 13)
    assert not span_map(inputs, chunk_size=8)[0].any(), "no state crosses the start of a document"


@KINDS
def test_the_rule_and_its_gradients_are_those_of_transformers(
    by_channel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, function = {
        False: ("qwen3_next", "torch_chunk_gated_delta_rule"),
        True: ("kimi_linear", "chunk_kimi_delta_attention"),
    }[by_channel]
    theirs = getattr(modeling_in_fp64(family, monkeypatch), function)
    inputs = random_inputs(100, by_channel=by_channel)
    initial = torch.randn(
        BATCH, inputs.value.shape[2], KEY_DIM, inputs.value.shape[3], dtype=torch.float64
    )
    variables = (*tensors(inputs), initial.requires_grad_())
    decay = inputs.decay if by_channel else inputs.decay[..., 0]
    expected = getattr(theirs, "__wrapped__", theirs)(
        *(inputs.query, inputs.key, inputs.value, decay, inputs.beta[..., 0]),
        initial_state=initial,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    computed = delta_rule(inputs, initial)
    assert_close(computed, expected)
    assert_close(gradients(computed, variables), gradients(expected, variables))


@KINDS
def test_decays_of_any_strength_overflow_nowhere(by_channel: bool) -> None:
    exact = random_inputs(70, by_channel=by_channel, documents=True)
    with torch.no_grad():
        exact.decay.mul_(torch.logspace(-6, 4, 70, dtype=torch.float64)[None, :, None, None])
        exact.key[:, 10:40] = exact.key[:, 10:11]  # equal keys: a system far from the identity
        exact.beta[:, 10:40] = 1.0
    rounded = exact.map(
        lambda x: x.detach().float().requires_grad_() if x.is_floating_point() else x
    )
    computed, expected = delta_rule(rounded), recurrence(exact)
    assert_close(computed, expected, tolerance=2e-5)
    grads = gradients(computed, tensors(rounded))
    assert_close(grads, gradients(expected, tensors(exact)), tolerance=5e-4)


def test_states_are_fp32_and_nothing_but_the_inputs_is_kept() -> None:
    inputs, kept = random_inputs(128, by_channel=False, dtype=torch.bfloat16), []
    with saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        out, state = delta_rule(inputs)
    assert {x.data_ptr() for x in kept} == {x.data_ptr() for x in tensors(inputs)}
    assert (out.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    assert_close((out, state), recurrence(inputs.map(torch.Tensor.double)), tolerance=2e-2)


@pytest.mark.parametrize("kind", ["gated_delta_net", "kda"])
def test_the_backward_allocates_what_the_plan_says(kind: str) -> None:
    length, groups, heads, key, value = 512, 4, 4, 64, 32
    sizes = LinearAttentionConfig(
        key_head_dim=key, value_head_dim=value, num_key_heads=groups, num_value_heads=heads
    )
    model = ModelConfig(vocab_size=128, linear_attention_type=kind, linear_attention=sizes)
    sizes_of_layer = LayerSizes.for_model(ModelShape.of(model), seq_length=length)
    working = max(operator.working for operator in MIXERS[kind].operators(sizes_of_layer))
    widths = {
        "query": (groups, key),
        "key": (groups, key),
        "value": (heads, value),
        "beta": (heads, 1),
    }
    widths["decay"] = (heads, key if kind == "kda" else 1)
    drawn = {name: -torch.rand(1, length, *shape) for name, shape in widths.items()}
    inputs = DeltaInputs(**{name: x.bfloat16().requires_grad_() for name, x in drawn.items()})
    out, _ = delta_rule(inputs)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        out.sum().backward()
    events = [
        event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"
    ]
    held = np.cumsum(
        [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    )
    assert max(held) == pytest.approx(working, rel=0.06)
