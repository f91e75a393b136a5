"""Twenty-one planted sums whose order or shape follows the layout: each changes bits, and is found."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from nanotrain.comm.collectives import barrier
from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.model import invariant_elements as elements
from nanotrain.model import invariant_experts as experts
from nanotrain.model import invariant_mla as mla
from nanotrain.model import invariant_scan as scan
from nanotrain.optim import invariant as optim
from nanotrain.optim.rule import ParamRange
from nanotrain.parallel.cp import block_attention
from nanotrain.parallel.tp import invariant as layers
from nanotrain.parallel.tp import invariant_loss as loss
from tests.harness import run_ranks
from tests.laws.invariant import (
    RankResult,
    bits_of,
    first_difference,
    invariant,
    run_layouts,
)
from tests.laws.test_mla import MLA as MLA_SIZES
from tests.laws.worlds import GLOBAL_BATCH

# sizes that leave a rest of a vector, of 8 numbers or more, on one of two ranks
MODEL = {"num_query_groups": 4, "ffn_hidden_size": 60, "add_bias_linear": True}
DATA = {"seq_length": 20}


def chain(parts: Any) -> Tensor:
    """The blocks one after another."""
    first, *others = parts
    total = first.float()
    for part in others:
        total = total + part
    return total


def plain_token_sum(values: Tensor, *, num_addends: int) -> Tensor:
    """torch's sum in fp32."""
    return values.flatten(0, -2).sum(0).double()


def one_product(scaled: Tensor, rows: Tensor, *, num_addends: int) -> Tensor:
    """Weight gradients of all tokens at once."""
    grads = scaled.flatten(1, 2).mT
    return (grads @ rows.flatten(1, 2)).double()


def in_fp32(scaled: Tensor, rows: Tensor, *, num_addends: int) -> Tensor:
    """Weight gradients whose blocks are added in fp32."""
    return (scaled.mT @ rows).sum(1).double()


def one_block_of_rows(blocks: layers.UnitBlocks, x: Tensor) -> Tensor:
    return x.reshape(1, -1, x.shape[2])


def one_block_per_rank(blocks: layers.UnitBlocks, group: Any) -> int:
    return 1


def plain_squares(values: Tensor) -> Tensor:
    """One number of fp32 sums per shard."""
    return torch.tensor([float(values.float().square().sum()), 0.0, 0.0, 0.0]).double()


def not_padded(part: ParamRange) -> ParamRange:
    return part


def sum_in_fp32(values: Tensor, grid: float) -> Tensor:
    return values.float()


def as_it_is(whole: elements.InWholeVectors, *inputs: Tensor) -> Tensor:
    return whole.function(*inputs)


def one_block_per_chunk(attention: block_attention.BlockAttention, length: int) -> list[range]:
    if attention.group.size == 1:
        return [range(length)]
    size = length // 2
    chunks = block_attention.zigzag_chunks(attention.group.index, attention.group.size)
    return [range(chunk * size, (chunk + 1) * size) for chunk in chunks]


def one_product_per_expert(slots: Tensor, offs: Tensor, *, block_length: int) -> experts.SlotPlan:
    """Tokens of an expert one after the other, whatever their token block."""
    counts = offs.diff(prepend=offs.new_zeros(1))
    products = -(-counts // block_length)
    starts = (products.cumsum(0) - products) * block_length
    first = offs - counts
    expert = torch.repeat_interleave(torch.arange(len(offs)), counts)
    rows = torch.arange(len(slots)) - first[expert] + starts[expert]
    return experts.SlotPlan(rows.long(), products.tolist())


def logits_at_once(hidden: Tensor, weight: Tensor, *, blocks: layers.UnitBlocks) -> Tensor:
    """torch's product of all tokens."""
    return torch.nn.functional.linear(hidden.float(), weight.float())


def joined(x: Tensor) -> Tensor:
    """The gradients of routed and shared experts are added in any order."""
    return x


def dot_in_fp32(left: Tensor, right: Tensor) -> Tensor:
    """One number of fp32 sums per shard."""
    products = (left.float() * right.float()).sum().double()
    return torch.stack([products, *products.new_zeros(3)])


def sum_of_rank(parts: Any, group: Any) -> Tensor:
    """The heads of a rank one after another, then the ranks."""
    return ORIGINAL_SUM([chain(parts)], group)


def at_once(grouped: scan.GroupedScan, inputs: Any) -> Tensor:
    return grouped.scan(inputs)


@dataclass(frozen=True)
class Place:
    """The layout of two ranks and the model that find a plants."""

    parallel: dict[str, Any]
    model: dict[str, Any] = field(default_factory=dict)
    optim: dict[str, Any] = field(default_factory=dict)


EXPERTS = {
    "num_experts": 4,
    "moe_ffn_hidden_size": 24,
    "moe_shared_expert_intermediate_size": 16,
    "add_bias_linear": False,
}
MAMBA = {
    "hybrid_layer_pattern": "M",
    "mamba_state_dim": 6,
    "mamba_head_dim": 8,
    "mamba_num_heads": 8,
    "mamba_num_groups": 4,
}
TWO_TP = {"tensor_model_parallel_size": 2}
ZERO1 = {"data_parallel_sharding_strategy": "optim"}
ORIGINAL_SUM = layers.sum_over_blocks
DP = Place(ZERO1)
TP = Place(TWO_TP)
CP = Place({"context_parallel_size": 2, "cp_comm_type": "allgather"})
EP = Place({"expert_model_parallel_size": 2, **ZERO1}, EXPERTS)
ETP = Place({**TWO_TP, "expert_tensor_parallel_size": 1}, EXPERTS)
SHARDED = Place({**TWO_TP, "expert_tensor_parallel_size": 2}, EXPERTS)
HYBRID = Place(TWO_TP | {"sequence_parallel": True}, MAMBA)
HYPERBALL = Place(ZERO1, optim={"optimizer": "muon_h"})
MLA = Place(TWO_TP | {"sequence_parallel": True}, MLA_SIZES)
PLACES = {
    "dp": DP,
    "tp": TP,
    "cp": CP,
    "ep": EP,
    "etp": ETP,
    "sharded": SHARDED,
    "hyperball": HYPERBALL,
    "mla": MLA,
}
# what is replaced, by what, and what finds it
Plant = tuple[Any, str, Callable[..., Any], Place]
PLANTS: dict[str, Plant] = {
    "a chain in place of the tree": (layers, "tree_sum", chain, TP),
    "gradients of biases in fp32": (layers, "token_sum", plain_token_sum, DP),
    "gradients of norms in fp32": (elements, "token_sum", plain_token_sum, DP),
    "weight gradients of all tokens at once": (layers, "weight_gradient", one_product, DP),
    "blocks of tokens added in fp32": (layers, "weight_gradient", in_fp32, DP),
    "all rows in one product": (layers.UnitBlocks, "rows", one_block_of_rows, CP),
    "one block of weights per rank": (layers.UnitBlocks, "local", one_block_per_rank, TP),
    "squares added per shard": (optim, "square_bins", plain_squares, DP),
    "ranges that end within a vector": (optim, "_padded", not_padded, DP),
    "losses added in fp32": (loss, "on_grid", sum_in_fp32, DP),
    "activations that end within a vector": (elements.InWholeVectors, "__call__", as_it_is, TP),
    "tokens of an expert in any row": (experts, "plan_slots", one_product_per_expert, EP),
    "logits of all tokens in one product": (experts, "blocked_logits", logits_at_once, EP),
    "gradients of experts added in any order": (experts._Joined, "apply", joined, ETP),
    "norms of matrices added per shard": (optim, "product_bins", dot_in_fp32, HYPERBALL),
    "blocks of experts added per rank": (experts, "sum_over_blocks", sum_of_rank, SHARDED),
    "all groups of a rank in one scan": (scan.GroupedScan, "__call__", at_once, HYBRID),
    "gradients of taps in fp32": (scan, "token_sum", plain_token_sum, HYBRID),
    "heads of a shared key added per rank": (mla, "sum_over_blocks", sum_of_rank, MLA),
    "all tokens of a shard in one product": (layers.UnitBlocks, "rows", one_block_of_rows, MLA),
    "keys of a chunk in one block": (
        block_attention.BlockAttention,
        "local_blocks",
        one_block_per_chunk,
        CP,
    ),
}


@contextmanager
def planted(ctx: ParallelContext, name: str) -> Iterator[None]:
    """Replace a function on all ranks, which are threads, while all of them are in the block."""
    owner, attribute, replacement, _ = PLANTS[name]
    barrier(ctx.control)
    original = ORIGINALS[name]
    setattr(owner, attribute, replacement)
    try:
        yield
    finally:
        barrier(ctx.control)
        setattr(owner, attribute, original)


ORIGINALS = {name: getattr(owner, attribute) for name, (owner, attribute, _, _) in PLANTS.items()}


def run_planted(ctx: ParallelContext, names: list[str], micro_batch_size: int) -> list[RankResult]:
    """Two steps with each plant, on one rank or in the layout that finds it."""
    results = []
    for name in names:
        place = PLANTS[name][3]
        case = invariant(
            2,
            model=MODEL | {"num_layers": 1} | place.model,
            data=DATA,
            optim=place.optim,
            train={"micro_batch_size": micro_batch_size},
            parallel=place.parallel if ctx.topology.world_size > 1 else {},
        )
        with planted(ctx, name):
            results += run_layouts(ctx, [case])
    return results


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_every_planted_order_is_found(place: Place) -> None:
    assert len(PLANTS) == 21
    names = [name for name, plant in PLANTS.items() if plant[3] is place]
    on_one_rank = run_ranks(1, run_planted, names, GLOBAL_BATCH, shares=True)[0]
    by_rank = run_ranks(2, run_planted, names, 1, shares=True)
    for number, name in enumerate(names):
        bits = bits_of([results[number] for results in by_rank])
        assert first_difference(bits, bits_of([on_one_rank[number]])), f"{name} was not found"
