"""Linear attention over sequences that are sharded over cp: states are passed between ranks.

state passing   every rank reduces each of its two chunks to an affine map of the state, all-gathers
                the maps, composes the maps of the earlier chunks, and computes its outputs from the
                states before its chunks
Ulysses         all-to-all to full sequences of 1 / cp of the heads, and back (--cp-comm-type a2a)

all-gather      2 B N (T + K V) elements of fp32 per rank, whatever the length of the sequence;
                T elements per transition: K K for the delta rule, 1 for a factor per head
backward        reduce-scatter of the gradients of the maps

scan_over         a rule by one of these ways; delta_rule_over, the gated delta rule
start_states      the states before the local chunks, for any layer whose chunks are affine maps

B batch   S sequence   L = S / cp   G heads of queries and keys   N heads of values   K, V head dims
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nanotrain.attention.delta_rule import delta_rule, span_map
from nanotrain.attention.scan_inputs import DeltaInputs
from nanotrain.comm.autograd import gather_along
from nanotrain.comm.group import Group
from nanotrain.parallel.cp.chunks import chunk_rows, join_rows
from nanotrain.parallel.cp.split import join_shards, local_chunks, zigzag_chunks
from nanotrain.parallel.cp.ulysses import UlyssesAttention, repeat_heads


@dataclass(frozen=True)
class Rule:
    """A rule of linear attention."""

    # inputs, and the state before them or None -> outputs, state after them
    scan: Callable[..., tuple[Tensor, Tensor]]
    # inputs -> arguments of `start_states`
    span_map: Callable[[DeltaInputs], tuple[Tensor, Tensor]]


def delta_rule_over(inputs: DeltaInputs, group: Group, *, comm_type: str) -> Tensor:
    """The gated delta rule over sequences sharded across cp (`scan_over`)."""
    rule = Rule(scan=delta_rule, span_map=span_map)
    return scan_over(inputs, group, comm_type=comm_type, rule=rule)


def scan_over(inputs: DeltaInputs, group: Group, *, comm_type: str, rule: Rule) -> Tensor:
    """The outputs of a rule for the local tokens: [B, L, N, V].

    Args:
        inputs: inputs at the local tokens, except `starts` [B, S] of full sequences.
        group: the cp group; with one rank nothing is communicated.
        comm_type: `--cp-comm-type`, "a2a" for Ulysses.
        rule: scan of a sequence, and the map of the state over a span of it.
    """
    if group.size == 1:
        out, _ = rule.scan(inputs, None)
        return out
    if comm_type == "a2a":
        return _scan_head_shards(inputs, group, rule=rule)
    return _scan_chunks(inputs, group, rule=rule)


def _scan_chunks(inputs: DeltaInputs, group: Group, *, rule: Rule) -> Tensor:
    """State passing; each local chunk is a separate row."""
    if inputs.starts is not None:
        starts = local_chunks(inputs.starts, index=group.index, size=group.size)
        inputs = replace(inputs, starts=starts)
    rows = inputs.map(lambda x: chunk_rows(x, group))
    transition, offset = rule.span_map(rows)
    states = start_states(transition, offset, group=group)
    out, _ = rule.scan(rows, states)
    return join_rows(out, group)


def start_states(transition: Tensor, offset: Tensor, *, group: Group) -> Tensor:
    """The states before the local chunks, from the affine map of the state over each chunk.

    Args:
        transition: [2 B, N, K, K], the matrix of each chunk, or a factor of the state: [2 B, N, 1
            or K, 1].
        offset: [2 B, N, K, V], the state after a chunk from a state of zeros before it.
        group: the cp group.

    Returns:
        [2 B, N, K, V]; the two chunks of a sample are adjacent, here and in the arguments.
    """
    packed = torch.cat((transition.flatten(1), offset.flatten(1)), dim=1)
    shard = packed.view(1, -1, 2, packed.shape[1])
    gathered = join_shards(gather_along(shard, group, dim=0))  # [B, 2 cp, ...]
    numels = (transition[0].numel(), offset[0].numel())
    flat_transitions, flat_offsets = gathered.split(numels, dim=-1)
    transitions = flat_transitions.unflatten(2, transition.shape[1:]).unbind(1)
    offsets = flat_offsets.unflatten(2, offset.shape[1:]).unbind(1)

    first, last = zigzag_chunks(group.index, group.size)
    state = torch.zeros_like(offsets[0])
    states = [state]
    for chunk in range(last):
        state = _apply_transition(transitions[chunk], state) + offsets[chunk]
        states.append(state)
    return torch.stack((states[first], states[last]), dim=1).flatten(0, 1)


def _apply_transition(transition: Tensor, state: Tensor) -> Tensor:
    """A factor per head or channel, or a matrix, times states [B, N, K, V]."""
    if transition.shape[-1] == 1:
        return transition * state
    return transition @ state


def _scan_head_shards(inputs: DeltaInputs, group: Group, *, rule: Rule) -> Tensor:
    """Ulysses: full sequences of 1 / cp of the heads."""
    ulysses = UlyssesAttention(group)
    query = repeat_heads(inputs.query, group.size)
    key = repeat_heads(inputs.key, group.size)
    query, key, value = ulysses.to_head_shards([query, key, inputs.value])
    decay, beta = ulysses.to_head_shards([inputs.decay, inputs.beta])  # fp32
    out, _ = rule.scan(DeltaInputs(query, key, value, decay, beta, inputs.starts), None)
    return ulysses.to_sequence_shards(out)
