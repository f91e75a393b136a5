"""Laws L1 to L7 for features of the model: one world of each layout trains every model in every
way.

L1  two steps: losses, norms and weights of one rank         L5  resident and sent bytes are the planned ones
L2  initial weights of one rank, to the bit                  L6  stages of every length, every schedule
L3, L7  stopped after a step and resumed, recomputed and overlapped: the same bits
L4  loads to the bit what one rank saved; its own checkpoint holds the same global tensors
"""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nanotrain.checkpoint.read import read_global_tensors
from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.plan.traffic import sent_bytes
from nanotrain.train.resume.rollback import roll_back
from nanotrain.train.run import Run
from nanotrain.train.step import StepOutput
from tests.harness import SHORT_NAMES, run_ranks
from tests.laws.compare import LOSS_TOLERANCE, assert_alike
from tests.laws.more_layouts import with_mark
from tests.laws.test_any_topology import State, global_tensors, save_step, state_of
from tests.laws.test_bytes import planned_resident_bytes, resident_bytes
from tests.laws.worlds import (
    GLOBAL_BATCH,
    Case,
    Outcome,
    assemble,
    build_here,
    held_weights,
    micro_batch_size,
    outcome_of,
    train_steps,
)

SAVED = Path("checkpoints", "step-00000001")
STEPS, OPTIM = 2, {"lr": 3e-3, "adam_eps": 1e-5}
DROPOUT = {"attention_dropout": 0.2, "hidden_dropout": 0.1}
WINDOWS = {"window_size": 5, "window_attn_skip_freq": "2"}
YARN = {
    "position_embedding_type": "yarn",
    "rotary_scaling_factor": 3.0,
    "original_max_position_embeddings": 8,
    "beta_fast": 4.0,
    "mscale_all_dim": 0.5,
    "query_scaling_beta": 0.3,
}
EXPERTS = {"num_experts": 4, "moe_ffn_hidden_size": 24}
# each has as many features as go together, so that every feature is in every layout
MODELS: dict[str, dict[str, Any]] = {
    # norms of OLMo, experts of gpt-oss
    "sinks, norms after, clamped experts": DROPOUT
    | WINDOWS
    | EXPERTS
    | {
        "softmax_type": "learnable",
        "softmax_scale": 0.2,
        "norm_placement": "post",
        "qk_layernorm": True,
        "qk_layernorm_across_heads": True,
        "num_query_groups": 1,  # replicated over tp
        "rotary_base_local": 100.0,
        "position_embedding_type": "longrope",  # and longer than the original context
        "longrope_short_factor": [1.0] * 5,
        "longrope_long_factor": [1.0, 1.3, 2.0, 3.0, 5.0],
        "longrope_original_max_positions": 16,
        "longrope_attention_factor": 1.2,
        "window_num_attention_heads": 8,
        "window_rotary_percent": 0.6,
        "attention_output_gate": True,
        "attention_output_gate_per_head": True,
        "attention_output_gate_activation": "softplus",
        "activation": "quick_geglu",
        "glu_linear_offset": 1.0,
        "activation_func_clamp_value": 0.3,
        "add_bias_linear": True,
        "moe_aux_loss_coeff": [0.01],
        "moe_router_enable_expert_bias": True,
    },
    # norms and ends of Gemma
    "off-by-one softmax, norms on both sides, soft-capped": DROPOUT
    | WINDOWS
    | YARN
    | {
        "kv_channels": 16,
        "value_channels": 12,
        "num_query_groups": 1,  # replicated over tp, beside heads that tp shards
        "window_query_groups": 4,
        "attention_output_multiplier": 0.7,
        "rotary_percent": 0.5,
        "no_rope_freq": "[1,0]",
        "rotary_seq_len_interpolation_factor": 2.0,
        "softmax_type": "off-by-one",
        "attn_logit_softcapping": 0.5,
        "final_logit_softcapping": 4.0,
        "normalization": "LayerNorm",
        "norm_placement": "sandwich",
        "apply_layernorm_1p": True,
        "qk_layernorm": True,
        "qk_layernorm_after_rope": True,
        "activation": "xielu",
        "scale_embeddings": True,
        "embedding_multiplier": 0.5,
        "logits_scaling": 2.0,
        "mtp_num_layers": 1,
        "mtp_loss_scaling_factor": 0.8,
    },
    "MLA with YaRN, experts in turn": DROPOUT
    | YARN
    | EXPERTS
    | {
        "num_query_groups": None,
        "multi_latent_attention": True,
        "kv_lora_rank": 16,
        "qk_head_dim": 8,
        "qk_pos_emb_head_dim": 4,
        "v_head_dim": 8,
        "attention_output_gate": True,
        "attention_output_gate_per_head": True,
        "activation": "squared_relu",
        "normalization": "L2Norm",
        "embedding_l2_norm": True,
        "residual_multiplier": 0.5,
        "logits_scaling": 0.5,
        "moe_router_force_load_balancing": True,
        "mtp_num_layers": 1,
    },
    # for stages of any lengths
    "four layers": DROPOUT
    | WINDOWS
    | {
        "num_layers": 4,
        "no_rope_freq": "[0]*3+[1]",
        "mtp_num_layers": 2,
        "untie_embeddings_and_output_weights": True,
    }
    | {"softmax_type": "learnable", "sinks_in_windows_only": True},
}
FEATURES = [name for name in MODELS if name != "four layers"]
VPP = {"pipeline_schedule": "interleaved", "num_virtual_stages_per_pipeline_rank": 2}
SP, ZB, GPIPE = (
    {"sequence_parallel": True},
    {"pipeline_schedule": "zb-h1"},
    {"pipeline_schedule": "gpipe"},
)
ZERO3 = {"strategy": "optim_grads_params"}


def stages(layout: str) -> dict[str, str]:
    return {"pipeline_model_parallel_layout": layout}


@dataclass(frozen=True)
class Layout:
    """Ranks, sharding strategy and sizes of axes, options; `models` are trained in it, on few
    samples.
    """

    num_ranks: int
    sizes: dict[str, Any]
    options: dict[str, Any]
    recompute: str = "full"
    num_microbatches: int = 2
    models: tuple[str, ...] = tuple(FEATURES)
    global_batch: int = 6

    def case(self, model: str) -> Case:
        parallel = {SHORT_NAMES[name]: size for name, size in self.sizes.items()} | self.options
        batch = self.global_batch
        micro_batch = micro_batch_size(
            self.num_ranks, self.sizes, self.num_microbatches, global_batch=batch
        )
        train = {"micro_batch_size": micro_batch, "global_batch_size": batch}
        return Case(STEPS).but(
            train=train, optim=OPTIM, parallel=parallel, model=MODELS.get(model, {})
        )

    def recomputed(self, model: str) -> Case:
        """The same with recomputation and overlap."""
        overlap = {"overlap_grad_reduce": True}
        overlap |= (
            {"overlap_param_gather": True} if self.sizes.get("strategy") != "no_shard" else {}
        )
        return self.case(model).but(parallel=overlap, memory=RECOMPUTED[self.recompute])


RECOMPUTED: dict[str, dict[str, Any]] = {
    "full": {"recompute_granularity": "full"},
    "groups": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 2,
    },
    "modules": {
        "recompute_granularity": "selective",
        "recompute_modules": ["core_attn", "layernorm", "mlp", "moe"],
    },
    "outputs": {
        "recompute_granularity": "selective",
        "recompute_modules": ["layernorm", "moe_act", "mla_up_proj"],
    },
}
MIXED = ("four layers",)
LAYOUTS = [
    Layout(4, {"strategy": "optim", "tp": 2, "cp": 2, "etp": 1, "ep": 2}, SP),
    Layout(2, {"strategy": "optim", "cp": 2}, {}, "modules", 1),
    Layout(2, {"strategy": "optim_grads", "tp": 2}, {}, "outputs", 1),
    Layout(2, {"strategy": "no_shard", "pp": 2}, ZB, num_microbatches=3),
    Layout(2, ZERO3, {}, num_microbatches=3),
    Layout(2, {"strategy": "optim", "pp": 2}, VPP | stages("E|tt|tt|m*2L"), "full", 3, MIXED),
    Layout(2, ZERO3 | {"pp": 2}, stages("Ettt|tm*2L"), "groups", 3, MIXED),
    Layout(2, {"strategy": "optim_grads", "pp": 2}, ZB | stages("Et|tttL"), "full", 3, MIXED),
    Layout(2, {"strategy": "no_shard", "pp": 2}, GPIPE | stages("E|ttttmmL"), "modules", 3, MIXED),
]
MORE_LAYOUTS = [
    Layout(4, ZERO3 | {"tp": 2, "pp": 2, "etp": 1, "ep": 2}, SP, "modules", 3),
    Layout(2, {"strategy": "optim", "cp": 2}, {"cp_comm_type": "allgather"}, "groups", 1),
    Layout(2, {"strategy": "optim", "cp": 2}, {"cp_comm_type": "a2a"}, "outputs", 1),
]


def name_of(layout: Layout) -> str:
    return f"{layout.num_ranks} {layout.sizes} {layout.options}"


@dataclass(frozen=True)
class Trained:
    """A model on one rank: initial weights, state after a step, both steps, and what another one
    saved.
    """

    initial: dict[Any, torch.Tensor]
    saved: State
    outcome: Outcome
    loaded: State


def train_in_every_way(
    ctx: ParallelContext, layout: Layout, own: Path, other: Path | None
) -> dict[str, Trained]:
    """Every model of the layout by name: saved in `own`, loaded from `other` and `own`."""
    return {
        name: train_model(ctx, layout, name, own=own / name, other=(other or own) / name)
        for name in layout.models
    }


def numbers_of(results: list[StepOutput]) -> list[tuple[Any, ...]]:
    return [(result.loss, result.grad_norm, result.metrics) for result in results]


def train_model(
    ctx: ParallelContext, layout: Layout, name: str, *, own: Path, other: Path
) -> Trained:
    """Train a model; asserts what needs no other rank."""
    run = build_here(ctx, layout.case(name), folder=own)
    initial = held_weights(run)
    assert resident_bytes(run) == planned_resident_bytes(run), (
        f"{name}: allocated bytes are not the planned ones"
    )
    ctx.traffic.reset()
    first = train_steps(run, 1)
    assert_sent_as_planned(run, name=name)
    save_step(ctx, run)
    saved = state_of(run)
    results = first + train_steps(run, 1)
    outcome = outcome_of(run, results)

    resumed = build_here(ctx, layout.recomputed(name), checkpoint=own / SAVED, folder=own)
    assert_same_bits(state_of(resumed), saved, f"{name}: resumed")
    assert numbers_of(train_steps(resumed, 1)) == numbers_of(results[1:]), (
        f"{name}: resumed, recomputed, overlapped"
    )
    assert_same_bits(state_of(resumed), state_of(run), f"{name}: after the step after the resume")

    roll_back(resumed, other / SAVED)
    return Trained(initial, saved, outcome, loaded=state_of(resumed))


def assert_same_bits(
    found: dict[Any, torch.Tensor], expected: dict[Any, torch.Tensor], what: str
) -> None:
    """Assert that two sets of tensors are equal to the bit."""
    assert found.keys() == expected.keys(), what
    different = [box.name for box in found if not torch.equal(found[box], expected[box])]
    assert not different, f"{what}: {different}"


def assert_sent_as_planned(run: Run, *, name: str) -> None:
    """Assert the bytes of a step in every group that the plan counts; those of experts where
    routers are balanced.
    """
    for dp in run.data_parallel:
        dp.wait_for_params()
    for (group, operation), planned in sent_bytes(run.plan).items():
        moe = run.config.model.moe
        if group in ("ep", "etp") and not (moe and moe.router_force_load_balancing):
            continue
        sent = run.context.traffic.bytes(group, operation)
        assert sent == planned, (
            f"{name}: {sent} bytes in {group} {operation}, {planned} are planned"
        )


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Trained]]:
    """Checkpoints of one rank and what it computes."""
    folder = tmp_path_factory.mktemp("one-rank")
    single = Layout(1, {}, {}, num_microbatches=1, models=tuple(MODELS))
    return folder, run_ranks(1, train_in_every_way, single, folder, None, shares=True)[0]


@pytest.mark.parametrize("layout", [*LAYOUTS, *with_mark(MORE_LAYOUTS)], ids=name_of)
def test_a_layout_keeps_the_laws_with_every_feature(
    layout: Layout, one_rank: tuple[Path, dict[str, Trained]], tmp_path: Path
) -> None:
    folder, single = one_rank
    by_rank = run_ranks(
        layout.num_ranks, train_in_every_way, layout, tmp_path, folder, **layout.sizes, shares=True
    )
    assert_equal_to_one_rank(by_rank, single, layout)
    for name in layout.models:
        saved = global_tensors(ranks[name].saved for ranks in by_rank)
        stored = dict(read_global_tensors(tmp_path / name / SAVED, saved))
        assert_same_named(stored, saved, f"{name}: the checkpoint of {layout}")
    if layout.num_ranks == 4:
        (losses,) = run_ranks(
            1, losses_after_load, Layout(1, {}, {}, models=layout.models), tmp_path, shares=True
        )
        for name in layout.models:
            assert losses[name] == pytest.approx(
                by_rank[0][name].outcome.losses[1], rel=LOSS_TOLERANCE
            ), name


def one_sgd_step(ctx: ParallelContext, case: Case) -> tuple[Outcome, Outcome]:
    """What a rank holds before a step of SGD and after it."""
    run = build_here(ctx, case)
    initial = held_weights(run)
    outcome = outcome_of(run, train_steps(run, 1))
    return replace(outcome, weights=initial), outcome


def gradients(
    sizes: dict[str, Any], options: dict[str, Any], *, model: dict[str, Any]
) -> dict[str, torch.Tensor]:
    """The gradient of every parameter, as the step of a unit learning rate."""
    parallel = {SHORT_NAMES[name]: size for name, size in sizes.items()} | options
    num_ranks = math.prod(size for size in sizes.values() if isinstance(size, int))
    train, optim = (
        {"micro_batch_size": GLOBAL_BATCH},
        {"optimizer": "sgd", "lr": 1.0, "clip_grad": 0.0},
    )
    case = Case(1).but(
        train=train, optim=optim | {"weight_decay": 0.0}, parallel=parallel, model=model
    )
    before, after = zip(
        *run_ranks(num_ranks, one_sgd_step, case, **sizes, shares=True), strict=True
    )
    initial, weights = assemble(list(before)), assemble(list(after))
    return {name: initial[name] - weight for name, weight in weights.items()}


def test_gradients_of_experts_of_a_compressed_width_are_those_of_one_rank() -> None:
    """Theirs are 1e-4, as small as the epsilon of Adam, whose step then shows their rounding: up to
    2e-5 of a weight.

    Computed in fp64 throughout, weights after two steps of Adam differ by 2e-16 between these
    layouts.
    """
    model = MODELS["sinks, norms after, clamped experts"] | {"moe_latent_size": 16}
    # gates and more heads leave smaller gradients of keys, which show more of their rounding
    gates = ("attention_output_gate", "window_num", "window_rotary")
    model = {key: value for key, value in model.items() if not key.startswith(gates)}
    single = gradients({}, {}, model=model)
    for sizes, options in (({"tp": 2}, {}), ({"cp": 2}, {}), ({"pp": 2}, ZB)):
        for name, found in gradients(sizes, options, model=model).items():
            off, largest = (found - single[name]).abs().max(), single[name].abs().max()
            assert off <= 1e-4 * largest, (
                f"{name} in {sizes} {options}: off by {off:.1e} of {largest:.1e}"
            )


def test_every_feature_is_drawn_with_and_without_sequence_parallelism() -> None:
    drawn = {(model, bool(layout.options.get("sequence_parallel"))) for layout in LAYOUTS for model in layout.models
             if layout.sizes.get("tp", 1) > 1}  # fmt: skip
    assert drawn == {(model, sp) for model in FEATURES for sp in (True, False)}


def losses_after_load(ctx: ParallelContext, layout: Layout, folder: Path) -> dict[str, float]:
    """The loss of a step from each model's checkpoint."""
    runs = {
        name: build_here(ctx, layout.case(name), checkpoint=folder / name / SAVED, folder=folder)
        for name in layout.models
    }
    return {name: train_steps(run, 1)[0].loss for name, run in runs.items()}


def assert_equal_to_one_rank(
    by_rank: list[dict[str, Trained]], single: dict[str, Trained], layout: Layout
) -> None:
    """L1, L2 and the first half of L4."""
    for name in layout.models:
        row, ranks, expected = (
            f"{name} {layout.sizes} {layout.options}",
            [each[name] for each in by_rank],
            single[name],
        )
        outcomes = [rank.outcome for rank in ranks]
        assert_alike(
            outcomes, [expected.outcome], row=row, lr=OPTIM["lr"], global_batch=layout.global_batch
        )
        initial = [replace(rank.outcome, weights=rank.initial) for rank in ranks]
        assert_same_named(
            assemble(initial), assemble([replace(expected.outcome, weights=expected.initial)]), row
        )
        loaded = global_tensors(rank.loaded for rank in ranks)
        assert_same_named(
            loaded, global_tensors([expected.saved]), f"{row}: loads what one rank saved"
        )


def assert_same_named(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], what: str
) -> None:
    """Assert that global tensors are equal to the bit."""
    assert found.keys() == expected.keys(), what
    different = [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)]
    assert not different, f"{what}: {different}"
