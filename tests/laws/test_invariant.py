"""With `--invariant` every layout trains as one rank does, in every bit: losses, gradient norms,
weights and optimizer state.

The suite trains a dozen layouts for three steps; `make layouts` trains some more for four, and
with NANOTRAIN_DRILLS=1 all of them for 20.
"""

import os
from pathlib import Path
from typing import Any

import pytest

from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.topology.topology import Topology
from tests.harness import run_ranks
from tests.laws.invariant import (
    Bits,
    RankResult,
    bits_of,
    first_difference,
    invariant,
    result_of,
    run_here,
    run_layouts,
)
from tests.laws.more_layouts import with_mark
from tests.laws.test_any_topology import SAVED, save_step
from tests.laws.worlds import GLOBAL_BATCH, Case, build_here, config_of, train_here, train_steps

HAS_ALL = os.environ.get("NANOTRAIN_DRILLS") == "1"
MORE_STEPS = 20 if HAS_ALL else 4
LLAMA = {"num_query_groups": 4, "qk_layernorm": True, "untie_embeddings_and_output_weights": True}
GPT = {
    "hidden_size": 32,
    "ffn_hidden_size": 72,
    "num_query_groups": 4,
    "activation": "gelu",
    "normalization": "LayerNorm",
    "add_bias_linear": True,
    "position_embedding_type": "learned_absolute",
    "hidden_dropout": 0.1,
}
MODELS = {"llama": LLAMA, "gpt": GPT}
NAMES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
    "vpp": "num_virtual_stages_per_pipeline_rank",
    "schedule": "pipeline_schedule",
    "instances": "num_distributed_optimizer_instances",
    "strategy": "data_parallel_sharding_strategy",
    "sp": "sequence_parallel",
    "kind": "cp_comm_type",
    "outer": "outer_dp_sharding_strategy",
}
ZERO1, ZERO2, ZERO3 = "optim", "optim_grads", "optim_grads_params"


def layout(num_ranks: int, micro_batch_size: int, *, memory: str = "", **axes: Any) -> Any:
    """A number of ranks, and the sections of a case on them."""
    parallel = {NAMES.get(name, name): value for name, value in axes.items()}
    sections: dict[str, Any] = {
        "parallel": parallel,
        "train": {"micro_batch_size": micro_batch_size},
    }
    if memory:
        sections["memory"] = {"recompute_granularity": memory}
    if memory == "full":
        sections["memory"] |= {"recompute_method": "uniform", "recompute_num_layers": 1}
    return num_ranks, sections


LAYOUTS = [
    layout(1, 1, memory="full"),
    layout(2, 2, strategy=ZERO1, memory="selective"),
    layout(2, 3, tp=2, sp=True),
    layout(2, 4, cp=2, kind="p2p"),
    layout(2, 2, cp=2, kind="a2a"),
    layout(2, 4, pp=2, schedule="zb-h1"),
    layout(3, 2, strategy=ZERO2),
    layout(4, 1, strategy=ZERO3),
    layout(4, 4, tp=4),
    layout(4, 3, strategy=ZERO2, instances=2, overlap_grad_reduce=True),
    layout(4, 2, tp=2, cp=2, sp=True, kind="allgather"),
    layout(4, 3, tp=2, pp=2, sp=True, strategy=ZERO1),
]
IN_BF16 = [LAYOUTS[1], LAYOUTS[2], LAYOUTS[3], LAYOUTS[5]]


def strategies(num_ranks: int, micro_batch_size: int, **axes: Any) -> list[Any]:
    """A layout with every sharding strategy."""
    names = ("no_shard", ZERO1, ZERO2, ZERO3)
    return [layout(num_ranks, micro_batch_size, strategy=name, **axes) for name in names]


MORE_LAYOUTS = [
    layout(1, 4),
    layout(1, 3, memory="selective"),
    *strategies(2, 2),
    *strategies(3, 4, overlap_grad_reduce=True),
    *strategies(4, 3),
    *strategies(6, 1),
    *strategies(4, 3, tp=2, sp=True),
    *strategies(4, 2, cp=2, kind="p2p"),
    *strategies(4, 2, cp=2, kind="a2a", memory="full"),
    *strategies(4, 2, pp=2),
    *strategies(8, 1, tp=4, sp=True),
    layout(2, 6, tp=2),
    layout(2, 2, tp=2, memory="full"),
    layout(4, 2, tp=4, sp=True, memory="selective"),
    layout(2, 3, cp=2, kind="allgather"),
    layout(2, 2, pp=2, schedule="gpipe"),
    layout(2, 2, pp=2, schedule="interleaved", vpp=2),
    layout(2, 1, pp=2, schedule="zb-v", vpp=2),
    layout(2, 1, pp=2, schedule="dualpipev", vpp=2),
    layout(4, 1, pp=4),
    layout(4, 1, pp=4, schedule="zb-h1", memory="full"),
    layout(4, 1, pp=2, schedule="zb-v", vpp=2, strategy=ZERO1),
    layout(4, 2, pp=2, schedule="zb-h1", tp=2, sp=True),
    layout(4, 2, pp=2, cp=2),
    layout(4, 3, strategy=ZERO1, instances=2),
    layout(4, 3, strategy=ZERO1, instances=2, outer="optim"),
    layout(4, 3, strategy=ZERO3, instances=2, overlap_param_gather=True),
    layout(8, 1, strategy=ZERO2, instances=2, tp=2),
    layout(8, 2, tp=2, cp=2, pp=2),
    layout(8, 2, tp=2, cp=2, pp=2, sp=True, schedule="zb-h1", strategy=ZERO1, kind="a2a"),
    layout(8, 3, tp=2, pp=2, sp=True, schedule="interleaved", vpp=2, strategy=ZERO1),
    layout(8, 1, tp=4, cp=2, sp=True),
    layout(8, 2, tp=4, pp=2),
    layout(8, 2, cp=2, strategy=ZERO2, instances=2),
    layout(4, 2, tp=2, cp=2, memory="full"),
]


def case_of(sections: dict[str, Any], *, model: str, dtype: str, steps: int = 3) -> Case:
    """A case with `--invariant`; deep pipelines need a layer per stage."""
    parallel = sections["parallel"]
    sizes = MODELS[model] | {"num_layers": 4 if steps == MORE_STEPS else 2}
    base = invariant(steps, model=sizes, precision={"params_dtype": dtype})
    return base.but(**sections | {"parallel": parallel})


def one_rank(model: str, dtype: str, steps: int = 3) -> Bits:
    """The bits of one rank with one microbatch."""
    sections = {"parallel": {}, "train": {"micro_batch_size": GLOBAL_BATCH}}
    case = case_of(sections, model=model, dtype=dtype, steps=steps)
    return bits_of(run_ranks(1, run_here, case, shares=True))


def assert_same_bits(layouts: list[Any], reference: Bits, **kind: Any) -> None:
    """Every layout leaves the bits of the reference; one world per number of ranks."""
    by_ranks: dict[int, list[dict[str, Any]]] = {}
    for num_ranks, sections in layouts:
        by_ranks.setdefault(num_ranks, []).append(sections)
    for num_ranks, all_sections in by_ranks.items():
        cases = [case_of(sections, **kind) for sections in all_sections]
        by_rank = run_ranks(num_ranks, run_layouts, cases, shares=True)
        for number, sections in enumerate(all_sections):
            bits = bits_of([results[number] for results in by_rank])
            difference = first_difference(bits, reference)
            assert not difference, f"{num_ranks} ranks, {sections}: {difference}"


def test_every_layout_has_the_bits_of_one_rank() -> None:
    reference = one_rank("llama", "fp32")
    assert_same_bits(LAYOUTS, reference, model="llama", dtype="fp32")


def test_layouts_in_bf16_have_the_bits_of_one_rank() -> None:
    reference = one_rank("gpt", "bf16")
    assert_same_bits(IN_BF16, reference, model="gpt", dtype="bf16")


@pytest.mark.parametrize("kind", with_mark([("llama", "fp32"), ("gpt", "bf16")]))
def test_more_layouts_have_the_bits_of_one_rank(kind: tuple[str, str]) -> None:
    model, dtype = kind
    reference = one_rank(model, dtype, MORE_STEPS)
    assert len(LAYOUTS + MORE_LAYOUTS) >= 60
    layouts = LAYOUTS + MORE_LAYOUTS if HAS_ALL else MORE_LAYOUTS[::6]
    assert_same_bits(layouts, reference, model=model, dtype=dtype, steps=MORE_STEPS)


def run_half(ctx: ParallelContext, case: Case, folder: Path) -> RankResult:
    """Two steps from the beginning and a checkpoint, or two steps from it if there is one."""
    context = ParallelContext.attach(Topology.of(config_of(case).parallel, ctx.topology.world_size))
    checkpoint = folder / SAVED if (folder / SAVED).exists() else None
    run = build_here(context, case, checkpoint=checkpoint, folder=folder)
    results = train_steps(run, 2)
    if checkpoint is None:
        save_step(context, run)
    return result_of(run, results)


@pytest.mark.parametrize(
    ("first", "second"), [(LAYOUTS[2], LAYOUTS[7]), (LAYOUTS[5], LAYOUTS[3])], ids=["tp", "pp"]
)
def test_a_run_that_changes_its_layout_equals_one_that_did_not(
    tmp_path: Path, first: Any, second: Any
) -> None:
    """From tp to ZeRO-3, and from a pipeline to context parallelism, in the middle of four steps."""
    whole = one_rank("llama", "fp32", 4)
    for number, (num_ranks, sections) in enumerate((first, second)):
        case = case_of(sections, model="llama", dtype="fp32", steps=4)
        bits = bits_of(run_ranks(num_ranks, run_half, case, tmp_path, shares=True))
        half = slice(2 * number, 2 * number + 2)
        assert bits.losses == whole.losses[half]
        assert bits.grad_norms == whole.grad_norms[half]
    assert not first_difference(Bits(whole.losses, whole.grad_norms, bits.state), whole)


def test_windows_and_sgd_have_the_bits_of_one_rank() -> None:
    """A window that ends within blocks of queries; momentum in place of moments."""
    sections = {"model": {"window_size": 7}, "optim": {"optimizer": "sgd"}}
    names = [LAYOUTS[1], LAYOUTS[3], LAYOUTS[10]]
    case = case_of({"parallel": {}, **sections}, model="llama", dtype="fp32")
    reference = bits_of(
        run_ranks(1, run_here, case.but(train={"micro_batch_size": 12}), shares=True)
    )
    changed = [(num_ranks, layout_sections | sections) for num_ranks, layout_sections in names]
    assert_same_bits(changed, reference, model="llama", dtype="fp32")


def test_it_trains_as_without_it() -> None:
    """The fixed orders change rounding only."""
    train = {"micro_batch_size": GLOBAL_BATCH}
    plain = run_ranks(1, train_here, Case(3).but(train=train, model=LLAMA), shares=True)[0]
    bits = one_rank("llama", "fp32")
    assert bits.losses == pytest.approx(plain.losses, rel=1e-5)
    assert bits.grad_norms == pytest.approx(plain.grad_norms, rel=1e-5)
