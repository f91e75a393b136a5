"""Law L5 for recomputation: for each mixer, each recompute module replaces what the plan counts.

A module that is replaced under another path, or counted for a kind of layer that it does not reach,
changes saved bytes or bytes over cp on one side alone.
"""

from typing import Any, get_args

import pytest
import torch

from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.config.config import Config
from nanotrain.config.parallel import RecomputeModule
from nanotrain.plan.traffic import attention
from nanotrain.spec.kinds import MIXERS
from tests.harness import run_ranks
from tests.laws.more_layouts import with_mark
from tests.plan.test_saved_bytes import (
    FULL,
    MODELS,
    OLMO,
    SELECTIVE,
    SIZES,
    configs_of,
    measured,
)
from tests.train.saved_tensors import Microbatch, live_and_planned, microbatch

OF_EXPERTS = ("moe", "moe_act", "pointwise")
MODULES: tuple[str, ...] = get_args(RecomputeModule)
EXPERTS = " --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 48"
# by mixer: the name of the model in `MODELS`
MODEL_OF = {
    "attention": "qwen3",
    "shared_kv": "shared keys",
    "mla": "mla",
    "dsa": "sparse attention",
    "shared_dsa": "shared selection",
    "block_sparse": "selected blocks",
    "sliding": "window",
    "csa": "compressed keys",
    "hca": "heavily compressed keys",
    "gated_delta_net": "gated delta net",
    "kda": "kda",
    "mamba2": "Mamba-2",
    "attention_mamba2": "attention beside Mamba-2",
    "short_conv": "short convolution",
}
# of dropped bytes: statistics of norms; rows of experts, which a plan counts as if evenly routed
TOLERANCE, EXPERT_TOLERANCE = 0.02, 0.05
TOTAL_TOLERANCE = 0.005


def modules_of(mixer: str) -> list[str]:
    """Modules that a model of this mixer may name."""
    is_latent = "multi-latent" in MODELS[MODEL_OF[mixer]]
    return [name for name in MODULES if is_latent or name != "mla_up_proj"]


def words_of(mixer: str, settings: str = "", *, has_experts: bool = False) -> str:
    """A command line of two layers of a mixer."""
    sizes = (
        "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 256 "
        "--micro-batch-size 1"
    )
    words = MODELS[MODEL_OF[mixer]].replace("--mlp-gate-multiplier 1.2", "")
    # so many heads of the index that their weights show in the bytes of a layer
    words = words.replace("--dsa-indexer-n-heads 4", "--dsa-indexer-n-heads 32")
    return f"{sizes} {words} {settings}{EXPERTS if has_experts else ''}"


def run_blocks(ctx: ParallelContext, case: Microbatch) -> None:
    """A forward and backward of the blocks of a stage, from traffic of zero."""
    ctx.traffic.reset()
    hidden = case.hidden + 0
    for function in case.stage.layer_functions:
        hidden = function(hidden, case.context)
    torch.autograd.backward(hidden, torch.ones_like(hidden))


def sent_and_planned(ctx: ParallelContext, config: Config) -> tuple[int, int]:
    """Bytes over cp of the blocks of a stage: counted, and planned."""
    case = microbatch(ctx, config)
    run_blocks(ctx, case)
    planned = sum(num_bytes for _, num_bytes in attention(case.plan))
    return ctx.traffic.bytes("cp"), planned // case.plan.num_microbatches


def test_every_mixer_has_a_model() -> None:
    assert {*MODEL_OF} == {*MIXERS}


@pytest.mark.parametrize("mixer", MIXERS)
def test_a_module_of_a_mixer_drops_the_bytes_that_the_plan_drops(mixer: str) -> None:
    cases = {"": words_of(mixer), "experts": words_of(mixer, has_experts=True)}
    cases[FULL] = words_of(mixer, FULL)
    for name in modules_of(mixer):
        cases[name] = words_of(mixer, f"{SELECTIVE} {name}", has_experts=name in OF_EXPERTS)
    configs = configs_of(cases, "1 rank")
    (results,) = run_ranks(1, measured, live_and_planned, configs, threads=False)
    counted, planned = results[""]
    assert planned == pytest.approx(counted, rel=TOTAL_TOLERANCE), f"{mixer}: all that is kept"
    for name, (counted, planned) in results.items():
        has_experts = name in OF_EXPERTS
        all_counted, all_planned = results["experts" if has_experts else ""]
        tolerance = EXPERT_TOLERANCE if has_experts else TOLERANCE
        if name != "experts":
            dropped = pytest.approx(all_counted - counted, rel=tolerance, abs=0)
            assert all_planned - planned == dropped, f"{mixer}: {name or 'none'}"


def sent_over_tp(ctx: ParallelContext, config: Config) -> int:
    """Bytes over tp of the blocks of a stage."""
    run_blocks(ctx, microbatch(ctx, config))
    return ctx.traffic.bytes("tp")


def test_pointwise_recomputation_sends_nothing_again() -> None:
    kept = f"{SIZES} {OLMO} --num-layers 2"  # whose norms of queries and keys span tp
    configs = configs_of({"kept": kept, "again": f"{kept} {SELECTIVE} pointwise"}, "tp2 sp")
    sizes = {"tp": 2, "sequence_parallel": True}
    for results in run_ranks(2, measured, sent_over_tp, configs, **sizes):
        assert results["again"] == results["kept"] > 0


@pytest.mark.parametrize("comm_type", ["allgather", "a2a", *with_mark(["p2p"])])
def test_recomputation_sends_over_cp_what_the_plan_sends(comm_type: str) -> None:
    cases: dict[str, Any] = {}
    for mixer in MIXERS:
        if "--sparse-attention-type" in words_of(mixer) and comm_type != "allgather":
            continue
        cases[f"{mixer} none"] = words_of(mixer)
        cases[f"{mixer} none, bf16"] = words_of(mixer, "--bf16")
        cases[f"{mixer} full"] = words_of(mixer, f"{FULL} --bf16")
        for name in modules_of(mixer):
            if name in ("core_attn", "mla_up_proj", "layernorm", "pointwise"):
                cases[f"{mixer} {name}"] = words_of(mixer, f"{SELECTIVE} {name}")
    # a fourth of the tokens: what is sent is counted exactly, however few they are
    shorter = {name: words.replace("-length 256", "-length 64") for name, words in cases.items()}
    configs = configs_of(shorter, f"cp2 {comm_type}")
    sizes = {"cp": 2, "cp_comm_type": comm_type}
    for results in run_ranks(2, measured, sent_and_planned, configs, **sizes):
        for name, (counted, planned) in results.items():
            assert counted == planned > 0, name
