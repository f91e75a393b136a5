"""Linear attention of sharded sequences is that of full sequences; only states are sent, whatever
the length.
"""

import pytest
import torch

from nanotrain.attention.scan_inputs import DeltaInputs
from nanotrain.parallel.cp.linear_attention import delta_rule_over, start_states
from nanotrain.parallel.cp.split import local_chunks, zigzag_chunks
from tests.attention.delta_inputs import (
    BATCH,
    HEADS,
    KEY_DIM,
    VALUE_DIM,
    random_inputs,
    recurrence,
    tensors,
)
from tests.harness import ranks, run_ranks

TOLERANCES = {torch.float64: 1e-10, torch.float32: 2e-5}


def compare(group, inputs: DeltaInputs, comm_type: str, tolerance: float) -> None:
    """Outputs and gradients of the local tokens, against the recurrence in fp64 of all tokens."""
    weights = torch.randn(
        inputs.value.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64
    )
    exact = inputs.map(
        lambda x: x.detach().double().requires_grad_() if x.is_floating_point() else x
    )
    expected = recurrence(exact)[0]
    grads = torch.autograd.grad(expected, tensors(exact), weights)

    def local(x):
        return local_chunks(x.detach(), index=group.index, size=group.size)

    shards = [local(x).requires_grad_() for x in tensors(inputs)]
    out = delta_rule_over(DeltaInputs(*shards, inputs.starts), group, comm_type=comm_type)
    computed = torch.autograd.grad(out, shards, local(weights).to(out.dtype))
    for ours, full in zip((out, *computed), (expected, *grads), strict=True):
        torch.testing.assert_close(ours.double(), local(full), rtol=tolerance, atol=tolerance)


WAYS = ("p2p", "a2a")
CASES = [
    (by_channel, way, dtype) for by_channel in (False, True) for way in WAYS for dtype in TOLERANCES
]


def compare_all(ctx) -> None:
    for by_channel, way, dtype in CASES:
        inputs = random_inputs(48, by_channel=by_channel, documents=True, dtype=dtype)
        compare(ctx.group("cp"), inputs, way, TOLERANCES[dtype])


@pytest.mark.parametrize("size", [2, 4])
def test_outputs_and_gradients_are_those_of_full_sequences(size):
    run_ranks(size, compare_all, cp=size)


@ranks(4, cp=4)
def test_a_layer_sends_its_states_and_nothing_that_grows_with_the_sequence(ctx):
    maps = 2 * BATCH * HEADS * (KEY_DIM * KEY_DIM + KEY_DIM * VALUE_DIM)
    for length in (16, 64):
        inputs = random_inputs(length, by_channel=False, dtype=torch.bfloat16)
        ctx.traffic.reset()
        out = delta_rule_over(inputs, ctx.group("cp"), comm_type="p2p")
        assert ctx.traffic.bytes("cp") == 3 * maps * 4, "an all-gather of fp32 to three other ranks"
        out.float().sum().backward()
        assert ctx.traffic.bytes("cp") == 2 * 3 * maps * 4, (
            "and the reduce-scatter of the gradients"
        )


@ranks(2, cp=2)
def test_states_that_only_decay_have_a_factor_as_their_transition(ctx):
    draw = torch.Generator().manual_seed(5)
    factors, steps = torch.rand(4, 3, 1, 1, generator=draw), torch.randn(4, 3, 2, 5, generator=draw)
    local = list(zigzag_chunks(ctx.group("cp").index, 2))
    states = [torch.zeros(1, 3, 2, 5)]
    for factor, step in zip(factors, steps, strict=True):
        states.append(factor * states[-1] + step)
    computed = start_states(factors[local], steps[local], group=ctx.group("cp"))
    torch.testing.assert_close(computed, torch.cat([states[chunk] for chunk in local]))
