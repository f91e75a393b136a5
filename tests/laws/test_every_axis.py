"""Law L1 as a matrix, and L7: every pair of axes, every strategy, dense and MoE, trains as one rank
does.

A row is a layout. `LAYOUTS` covers every pair of tp, sp, pp, vpp, cp, ep, etp and dp (asserted) on
2, 4 and 8 ranks, and so does what the suite runs of it: `make layouts` runs the others of 8 ranks,
whose pairs of axes rows of fewer ranks have too. A failure prints its row. Two or three steps: all losses but the first depend on
updated weights. What a third step or a microbatch that is neither first nor last finds, it finds on
two ranks, and in `test_one_rank.py`.
"""

from dataclasses import dataclass, field
from functools import cache
from itertools import combinations, product
from typing import Any

import pytest
import torch

from tests.harness import SHORT_NAMES, run_ranks
from tests.laws.compare import assert_alike
from tests.laws.more_layouts import with_mark
from tests.laws.worlds import GLOBAL_BATCH, Case, Outcome, micro_batch_size, train_here

# The epsilon damps the Adam step of gradients near zero, where rounding could move a weight by lr
# per step.
OPTIM = {"lr": 3e-3, "adam_eps": 1e-5}
EXPERTS = {
    "num_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 24,
    "moe_aux_loss_coeff": 1e-2,
    "moe_z_loss_coeff": 1e-3,
}
BIASED = EXPERTS | {
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_num_groups": 2,
    "moe_router_group_topk": 1,
    "moe_router_topk": 2,
    "moe_shared_expert_intermediate_size": 16,
    "moe_shared_expert_gate": True,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "untied": {"untie_embeddings_and_output_weights": True, "qk_layernorm": True},
    "gpt2": {
        "position_embedding_type": "learned_absolute",
        "normalization": "LayerNorm",
        "activation": "gelu_tanh",
        "add_bias_linear": True,
        "num_query_groups": None,
    },
    # rows of no multiple of 16 bytes: one product per expert
    "experts": EXPERTS | {"moe_ffn_hidden_size": 22},
    "biased": BIASED,
    "capacity": EXPERTS
    | {"moe_expert_capacity_factor": 1.0, "untie_embeddings_and_output_weights": True},
}


@dataclass(frozen=True)
class Layout:
    """A row: a model and the sizes of the axes."""

    model: str
    ranks: int
    strategy: str = "no_shard"
    sizes: dict[str, int] = field(default_factory=dict)
    microbatches: int = 0  # chosen by the ranks
    options: dict[str, Any] = field(default_factory=dict)
    overlaps_too: bool = False  # trained with overlap as well, which changes no bit
    is_large_in_suite: bool = False  # of 8 ranks, and not in `make layouts` alone

    def __post_init__(self) -> None:
        inside = self.sizes.get("tp", 1) * self.sizes.get("pp", 1) * self.sizes.get("cp", 1)
        two = (
            self.ranks > 2
            and "vpp" not in self.axes
            and GLOBAL_BATCH % (2 * self.ranks // inside) == 0
        )
        object.__setattr__(self, "microbatches", self.microbatches or (2 if two else 3))

    @property
    def steps(self) -> int:
        """Fewer where a step takes long."""
        return 2 if self.ranks > 2 else 3

    @property
    def axes(self) -> set[str]:
        """The axes larger than one; sp and vpp are options, dp is the remaining factor of the
        ranks.
        """
        axes = {axis for axis, size in self.sizes.items() if size > 1}
        axes |= {"sp"} if self.options.get("sequence_parallel") else set()
        axes |= (
            {"vpp"} if self.options.get("num_virtual_stages_per_pipeline_rank", 1) > 1 else set()
        )
        inside = self.sizes.get("tp", 1) * self.sizes.get("pp", 1) * self.sizes.get("cp", 1)
        return axes | ({"dp"} if self.ranks > inside else set())

    @property
    def num_layers(self) -> int:
        """Enough for every stage, and for ZeRO-3 to gather ahead."""
        stages = self.sizes.get("pp", 1) * self.options.get(
            "num_virtual_stages_per_pipeline_rank", 1
        )
        return 4 if stages > 2 or self.strategy == "optim_grads_params" else 2

    def __str__(self) -> str:
        parts = [self.model, f"{self.ranks} ranks", self.strategy]
        parts += [f"{axis}{size}" for axis, size in self.sizes.items()]
        parts += [f"{name}={value}" for name, value in self.options.items()]
        return " ".join([*parts, f"{self.microbatches} microbatches"])


SP = {"sequence_parallel": True}
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
GPIPE, ZB = {"pipeline_schedule": "gpipe"}, {"pipeline_schedule": "zb-h1"}
VPP = {"pipeline_schedule": "interleaved", "num_virtual_stages_per_pipeline_rank": 2}
ZB_V, DUAL = VPP | {"pipeline_schedule": "zb-v"}, VPP | {"pipeline_schedule": "dualpipev"}
TURNS, PADDED = {"overlap_moe_expert_parallel_comm": True}, {"moe_expert_rank_capacity_factor": 1.9}
OUTER, AVERAGE = {"outer_dp_sharding_strategy": "optim"}, {"ddp_average_in_collective": True}
KEPT, BLOCKS = (
    {"reshard_after_forward": False},
    {"fsdp_double_buffer": True, "fsdp_prefetch_depth": 2},
)
ALL_REDUCE = {"force_all_reduce": True}
GATHER, HEADS = {"cp_comm_type": "allgather"}, {"cp_comm_type": "a2a"}

LAYOUTS = [
    Layout("llama", 2, "no_shard", {"tp": 2}),
    Layout("llama", 2, "optim", {"tp": 2}, options=SP),
    Layout("gpt2", 2, "optim", {"tp": 2}),
    Layout("gpt2", 2, "optim", {"pp": 2}),
    Layout("llama", 2, "optim", {"pp": 2}, options=GPIPE),
    Layout("untied", 2, "optim_grads", {"pp": 2}, options=ZB | {"overlap_grad_reduce": True}),
    Layout("llama", 2, "optim_grads", {"pp": 2}, microbatches=4, options=VPP),
    Layout("llama", 2, "optim", {"pp": 2}, microbatches=4, options=ZB_V),
    Layout("llama", 2, "optim", {"cp": 2}),
    Layout("untied", 2, "optim_grads", {"cp": 2}, options=GATHER),
    Layout("gpt2", 2, "no_shard", {"cp": 2}, options=HEADS),
    Layout("experts", 2, "optim", {"ep": 2}),
    Layout("biased", 2, "optim_grads", {"ep": 2}),
    Layout("experts", 2, "optim_grads", {"ep": 2}, options=TURNS),
    Layout("experts", 2, "optim", {"tp": 2, "etp": 2}),
    Layout("capacity", 2, "optim", {"tp": 2, "etp": 1, "ep": 2}),
    Layout("llama", 4, "no_shard", {"tp": 2}),
    Layout("llama", 4, "optim", {"tp": 2}, options=SP | OVERLAP),
    Layout("untied", 4, "optim_grads", {"tp": 2}, options=SP | OVERLAP),
    Layout("llama", 4, "optim", {"tp": 4}),
    Layout("untied", 4, "optim", {"tp": 4}, options=SP),
    Layout("untied", 4, "no_shard", {"pp": 2}),
    Layout("gpt2", 4, "optim_grads", {"pp": 2}, options=ZB | OVERLAP),
    Layout("llama", 4, "optim", {"pp": 4}, microbatches=6),
    Layout("llama", 4, "optim", {"pp": 2}, microbatches=6, options=VPP | OVERLAP),
    Layout("untied", 4, "optim", {"tp": 2, "pp": 2}, options=SP),
    Layout("gpt2", 4, "optim", {"tp": 2, "pp": 2}, options=ZB | SP),
    Layout("llama", 4, "optim", {"tp": 2, "cp": 2}),
    Layout("untied", 4, "optim", {"tp": 2, "cp": 2}, options=SP | HEADS),
    Layout("llama", 4, "optim_grads", {"cp": 2}, options=GATHER | OVERLAP),
    Layout("gpt2", 4, "optim", {"cp": 4}),
    Layout("llama", 4, "optim", {"pp": 2, "cp": 2}),
    Layout("experts", 4, "optim_grads", {"ep": 2}, options=OVERLAP),
    Layout(
        "biased", 4, "optim", {"ep": 4}, microbatches=1, options={"moe_hierarchical_dispatch": 2}
    ),
    Layout("experts", 4, "no_shard", {"ep": 2}),
    Layout(
        "biased",
        4,
        "optim",
        {"tp": 2, "etp": 1, "ep": 4},
        options=SP | {"moe_expert_rank_capacity_factor": 4.0},
    ),
    Layout("capacity", 4, "optim_grads", {"tp": 2, "etp": 2, "ep": 2}, options=SP | TURNS | PADDED),
    Layout("biased", 4, "optim", {"tp": 2, "etp": 1, "ep": 2}, options=SP),
    Layout("experts", 4, "optim_grads", {"tp": 2, "etp": 2, "ep": 2}),
    Layout("capacity", 4, "optim", {"cp": 2, "ep": 2}, options={"moe_hierarchical_dispatch": 1}),
    Layout("biased", 4, "optim", {"pp": 2, "ep": 2}, options=ZB),
    Layout("experts", 4, "optim", {"pp": 2, "ep": 2}, options=VPP),
    Layout("gpt2", 4, "optim_grads", {"pp": 2, "tp": 2}, options=SP | ZB_V | OVERLAP),
    Layout("biased", 4, "optim", {"pp": 2, "ep": 2}, microbatches=6, options=DUAL | TURNS),
    Layout("experts", 4, "optim", {"tp": 2, "cp": 2, "etp": 2, "ep": 2}, options=SP),
    Layout("llama", 8, "optim", {"tp": 2, "pp": 2}, options=SP | OVERLAP),
    Layout(
        "untied",
        8,
        "optim_grads",
        {"tp": 2, "pp": 2, "cp": 2},
        options=SP,
        is_large_in_suite=True,
    ),
    Layout(
        "llama",
        8,
        "optim",
        {"tp": 2, "pp": 2, "cp": 2},
        microbatches=4,
        options=VPP | HEADS,
        is_large_in_suite=True,
    ),
    Layout("gpt2", 8, "optim_grads", {"pp": 2, "cp": 2}, options=ZB | OVERLAP),
    Layout("llama", 8, "optim", {"tp": 2, "cp": 2}, options=SP | OVERLAP),
    Layout(
        "biased",
        8,
        "optim",
        {"tp": 2, "pp": 2, "etp": 2, "ep": 2},
        options=SP | VPP,
        overlaps_too=True,
        is_large_in_suite=True,
    ),
    Layout("experts", 8, "optim_grads", {"tp": 2, "etp": 1, "ep": 4}, options=OVERLAP),
    Layout("capacity", 8, "optim", {"tp": 2, "pp": 2, "cp": 2, "etp": 2, "ep": 2}, options=SP | ZB),
    Layout("experts", 8, "no_shard", {"cp": 2, "etp": 2, "ep": 2}, options=GATHER),
    # optimizer instances (HSDP): shards inside, all-reduce across
    Layout("llama", 4, "optim", {"instances": 2}, microbatches=1),
    Layout("llama", 4, "optim_grads", {"instances": 2}, options=OVERLAP),
    Layout("llama", 4, "optim", {"instances": 4}, options=OVERLAP),
    Layout("untied", 4, "optim_grads", {"cp": 2, "instances": 2}, options=GATHER),
    Layout("experts", 4, "optim_grads", {"ep": 2, "instances": 2}, options=OVERLAP),
    Layout("biased", 4, "optim", {"ep": 2, "instances": 2}, microbatches=1),
    Layout(
        "experts",
        8,
        "optim",
        {"tp": 2, "etp": 1, "ep": 2, "instances": 2},
        options=SP,
        overlaps_too=True,
    ),
    Layout("untied", 8, "optim_grads", {"pp": 2, "instances": 2}, options=ZB | OVERLAP),
    Layout("llama", 8, "optim_grads", {"pp": 2, "instances": 2}, options=VPP),
    Layout("gpt2", 8, "optim", {"cp": 2, "instances": 4}, options=OVERLAP),
    Layout(
        "experts",
        8,
        "optim_grads",
        {"tp": 2, "etp": 1, "ep": 2, "instances": 2},
        options=SP,
        overlaps_too=True,
    ),
    Layout(
        "biased",
        8,
        "optim_grads",
        {"pp": 2, "ep": 2, "instances": 2},
        overlaps_too=True,
        is_large_in_suite=True,
    ),
    # optimizer state sharded across instances too
    Layout("llama", 4, "optim", {"instances": 2}, options=OUTER | OVERLAP),
    Layout("experts", 4, "optim_grads", {"ep": 2, "instances": 2}, options=OUTER),
    Layout("gpt2", 8, "optim_grads", {"pp": 2, "instances": 2}, options=OUTER | ZB | OVERLAP),
    Layout(
        "untied", 8, "optim_grads_params", {"tp": 2, "instances": 2}, options=OUTER | SP | OVERLAP
    ),
    Layout("biased", 4, "optim_grads_params", {"ep": 2, "instances": 2}, options=OUTER),
    # the mean inside the collective, and all-reduces instead of reduce-scatters
    Layout("biased", 4, "no_shard", {"ep": 2}, options=AVERAGE),
    Layout("experts", 4, "optim_grads", {"tp": 2, "etp": 1, "ep": 2}, options=AVERAGE | OVERLAP),
    Layout("experts", 4, "optim", {"ep": 2, "instances": 2}, options=AVERAGE | OUTER),
    Layout("llama", 4, "optim", {"instances": 2}, options=ALL_REDUCE | OUTER | OVERLAP),
    # parameters gathered per unit (ZeRO-3), also with instances
    Layout("llama", 2, "optim_grads_params", microbatches=2),
    Layout("llama", 4, "optim_grads_params", options=OVERLAP),
    Layout("untied", 4, "optim_grads_params", {"tp": 2}, options=OVERLAP),
    Layout("gpt2", 4, "optim_grads_params", {"pp": 2}, options=ZB | OVERLAP),
    Layout("llama", 4, "optim_grads_params", {"pp": 2}, options=VPP | OVERLAP),
    Layout("llama", 4, "optim_grads_params", {"pp": 2}, options=DUAL | OVERLAP),
    Layout("gpt2", 4, "optim_grads_params", {"cp": 2}, options=GATHER),
    Layout("experts", 4, "optim_grads_params", {"ep": 2}, options=OVERLAP),
    Layout("biased", 4, "optim_grads_params", {"tp": 2, "etp": 1, "ep": 2}),
    Layout("biased", 8, "optim_grads_params", {"pp": 2, "ep": 2}, options=VPP | OVERLAP),
    Layout(
        "capacity",
        8,
        "optim_grads_params",
        {"tp": 2, "pp": 2, "cp": 2, "etp": 2, "ep": 2},
        options=ZB,
        overlaps_too=True,
        is_large_in_suite=True,
    ),
    Layout("untied", 4, "optim_grads_params", {"tp": 2}, options=SP | OVERLAP | KEPT),
    Layout("gpt2", 4, "optim_grads_params", {"cp": 2}, options=GATHER | OVERLAP | BLOCKS),
    Layout("biased", 8, "optim_grads_params", {"pp": 2, "ep": 2}, options=VPP | OVERLAP | BLOCKS),
    Layout("llama", 4, "optim_grads_params", {"instances": 2}, options=OVERLAP),
    Layout(
        "experts",
        8,
        "optim_grads_params",
        {"tp": 2, "etp": 1, "ep": 2, "instances": 2},
        options=SP,
        overlaps_too=True,
    ),
]


IN_SUITE = [layout for layout in LAYOUTS if layout.ranks < 8 or layout.is_large_in_suite]
OTHERS = [layout for layout in LAYOUTS if layout not in IN_SUITE]


@cache
def single_rank(model: str, num_layers: int, steps: int) -> list[Outcome]:
    case = Case(steps).but(
        train={"micro_batch_size": GLOBAL_BATCH}, optim=OPTIM, model=shape_of(model, num_layers)
    )
    return run_ranks(1, train_here, case, shares=True)


def shape_of(model: str, num_layers: int) -> dict[str, Any]:
    shape = {"num_layers": num_layers} | MODELS[model]
    return shape | ({"moe_layer_freq": f"[0]*1+[1]*{num_layers - 1}"} if model == "biased" else {})


@pytest.mark.parametrize("layout", [*IN_SUITE, *with_mark(OTHERS)], ids=str)
def test_a_layout_trains_as_one_rank_does(layout: Layout) -> None:
    short = layout.sizes | {"strategy": layout.strategy}
    parallel = {SHORT_NAMES[name]: value for name, value in short.items()} | layout.options
    case = Case(layout.steps).but(
        train={
            "micro_batch_size": micro_batch_size(layout.ranks, layout.sizes, layout.microbatches)
        },
        optim=OPTIM,
        parallel=parallel,
        model=shape_of(layout.model, layout.num_layers),
    )
    outcomes = run_ranks(layout.ranks, train_here, case, **parallel, shares=True)
    reference = single_rank(layout.model, layout.num_layers, layout.steps)
    assert_alike(outcomes, reference, row=str(layout), lr=OPTIM["lr"])
    if layout.overlaps_too:
        overlapped = run_ranks(
            layout.ranks, train_here, case.but(parallel=OVERLAP), **parallel, shares=True
        )
        assert overlapped[0].losses == outcomes[0].losses
        for one, other in zip(outcomes, overlapped, strict=True):
            assert all(torch.equal(one.weights[box], other.weights[box]) for box in one.weights)


@pytest.mark.parametrize("layouts", [LAYOUTS, IN_SUITE], ids=["all", "suite"])
def test_layouts_have_every_pair_of_axes_and_every_strategy(layouts: list[Layout]) -> None:
    axes = ("tp", "sp", "pp", "vpp", "cp", "ep", "etp", "dp")
    covered = {
        pair for layout in layouts for pair in combinations(axes, 2) if layout.axes >= set(pair)
    }
    assert not set(combinations(axes, 2)) - covered
    drawn = {(layout.model, "sp" in layout.axes) for layout in layouts if "tp" in layout.axes}
    assert drawn == set(product(MODELS, (True, False))), (
        "every model with tp is trained with and without sp"
    )
    assert len(layouts) >= 40 and {layout.ranks for layout in layouts} == {2, 4, 8}
    for strategy in ("no_shard", "optim", "optim_grads", "optim_grads_params"):
        seen = set().union(*(layout.axes for layout in layouts if layout.strategy == strategy))
        wanted = {"tp", "pp", "cp", "ep", "dp"} | (
            {"instances"} if strategy != "no_shard" else set()
        )
        assert seen >= wanted, f"{strategy} misses an axis"


def test_experts_train_with_overlap_and_without_it_in_every_strategy() -> None:
    overlapped = [layout for layout in LAYOUTS if layout.overlaps_too and "ep" in layout.axes]
    seen = {(layout.strategy, axis) for layout in overlapped for axis in layout.axes}
    assert seen >= set(
        product(("optim", "optim_grads", "optim_grads_params"), ("tp", "pp", "instances"))
    )
