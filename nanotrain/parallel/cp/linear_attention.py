"""Linear attention over sequences that are sharded over cp: states are passed between ranks.

state passing   every rank reduces each of its two chunks of the sequence to an affine map of the state, all-gathers
                the maps, composes those of the earlier chunks, and computes its outputs from the states it gets
Ulysses         all-to-all to full sequences of 1 / cp of the heads, and back (--cp-comm-type a2a)

all-gather      2 B N (T + K V) elements of fp32 per rank, whatever the length of the sequence; T elements of a
                transition: K K of the delta rule, 1 of a factor per head
backward        the reduce-scatter of their gradients

scan_over         a rule by one of these ways; delta_rule_over, the gated delta rule
start_states      the states before the local chunks, for any layer whose chunks are affine maps of a state

B batch   S sequence   L = S / cp   G heads of queries and keys   N heads of values   K, V head dims
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nanotrain.attention.delta_rule import DeltaInputs, delta_rule, span_map
from nanotrain.comm.autograd import gather_along
from nanotrain.comm.group import Group
from nanotrain.parallel.cp.chunks import chunk_rows, join_rows
from nanotrain.parallel.cp.split import join_shards, local_chunks, zigzag_chunks
from nanotrain.parallel.cp.ulysses import UlyssesAttention


@dataclass(frozen=True)
class Rule:
    """A rule of linear attention."""

    # inputs, and the state before them or None -> outputs, state after them
    scan: Callable[..., tuple[Tensor, Tensor]]
    # inputs -> arguments of `start_states`
    span_map: Callable[[DeltaInputs], tuple[Tensor, Tensor]]


def delta_rule_over(inputs: DeltaInputs, group: Group, *, comm_type: str) -> Tensor:
    """`scan_over` of the gated delta rule."""
    return scan_over(inputs, group, comm_type=comm_type, rule=Rule(delta_rule, span_map))


def scan_over(inputs: DeltaInputs, group: Group, *, comm_type: str, rule: Rule) -> Tensor:
    """The outputs of a rule for the local tokens: [B, L, N, V].

    Args:
        inputs: of the local tokens, except `starts` [B, S] of full sequences.
        group: the cp group; with one rank nothing is communicated.
        comm_type: `--cp-comm-type`, "a2a" for Ulysses.
        rule: scan of a sequence, and the map of the state that a span of it is.
    """
    if group.size == 1:
        return rule.scan(inputs, None)[0]
    return (_by_heads if comm_type == "a2a" else _by_states)(inputs, group, rule=rule)


def _by_states(inputs: DeltaInputs, group: Group, *, rule: Rule) -> Tensor:
    """Each local chunk is a row of its own."""
    if inputs.starts is not None:
        inputs = replace(
            inputs, starts=local_chunks(inputs.starts, index=group.index, size=group.size)
        )
    rows = inputs.map(lambda x: chunk_rows(x, group))
    transition, offset = rule.span_map(rows)
    out, _ = rule.scan(rows, start_states(transition, offset, group=group))
    return join_rows(out, group)


def start_states(transition: Tensor, offset: Tensor, *, group: Group) -> Tensor:
    """The states before the local chunks, given how each of them maps the state before it to the
    state after it.

    Args:
        transition: [2 B, N, K, K], the matrix of each chunk, or a factor of the state: [2 B, N, 1
            or K, 1].
        offset: [2 B, N, K, V], the state after a chunk from a state of zeros before it.
        group: the cp group.

    Returns:
        [2 B, N, K, V]; the two chunks of a sample are adjacent, here and in the arguments.
    """
    packed = torch.cat((transition.flatten(1), offset.flatten(1)), dim=1)
    # [B, 2 cp, ...]
    gathered = join_shards(gather_along(packed.view(1, -1, 2, packed.shape[1]), group, dim=0))
    transitions, offsets = gathered.split((transition[0].numel(), offset[0].numel()), dim=-1)
    transitions, offsets = (
        x.unflatten(2, like.shape[1:]).unbind(1)
        for x, like in ((transitions, transition), (offsets, offset))
    )
    first, last = zigzag_chunks(group.index, group.size)
    states = [torch.zeros_like(offsets[0])]
    for factor, step in zip(transitions[:last], offsets[:last], strict=True):
        states.append(
            (factor * states[-1] if factor.shape[-1] == 1 else factor @ states[-1]) + step
        )
    return torch.stack((states[first], states[last]), dim=1).flatten(0, 1)


def _by_heads(inputs: DeltaInputs, group: Group, *, rule: Rule) -> Tensor:
    """Queries and keys are repeated up to the least common multiple of their heads and cp."""
    ulysses, heads = UlyssesAttention(group), inputs.query.shape[2]
    repeats = math.lcm(heads, group.size) // heads
    query, key = (
        x.repeat_interleave(repeats, dim=2) if repeats > 1 else x
        for x in (inputs.query, inputs.key)
    )
    query, key, value = ulysses.to_head_shards([query, key, inputs.value])
    decay, beta = ulysses.to_head_shards([inputs.decay, inputs.beta])  # fp32
    out, _ = rule.scan(DeltaInputs(query, key, value, decay, beta, inputs.starts), None)
    return ulysses.to_sequence_shards(out)
