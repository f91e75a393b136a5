"""Law L1 for the rules of hidden matrices beyond plain Muon, each in the layouts that divide a
matrix in another way: shards, instances, tensor-parallel blocks, replicated heads, stages, experts.

Iterations are in fp32, see test_optimizers.py.
"""

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from nanotrain.comm.parallel_context import ParallelContext
from tests.harness import SHORT_NAMES, run_ranks
from tests.laws.compare import assert_alike
from tests.laws.test_any_topology import save_step, train
from tests.laws.test_every_axis import EXPERTS, SP, ZB
from tests.laws.test_mla import MLA
from tests.laws.test_optimizers import bytes_of
from tests.laws.worlds import GLOBAL_BATCH, Case, Outcome, build_here, train_here

LR, STEPS = 3e-3, 2
MUON = {
    "optimizer": "muon",
    "muon_fp32_matmul_prec": "highest",
    "muon_extra_scale_factor": 0.2,
    "muon_use_nesterov": True,
}
RULES: dict[str, dict[str, Any]] = {
    "heads": MUON | {"muon_split_qkv_per_head": True},
    "gram": MUON | {"muon_ns_algorithm": "gram"},
    "normuon": MUON | {"optimizer": "normuon", "normuon_eps": 1e-4},
    "muon_h": {key: value for key, value in MUON.items() if "scale" not in key}
    | {"optimizer": "muon_h"},
    "adam_h": {"optimizer": "adam_h"},
}
# elements of an update relative to the learning rate; of Hyperball as the weights, whose norm it has
SIZES_OF_UPDATES = {"muon_h": 0.03, "adam_h": 0.03}
MODELS: dict[str, dict[str, Any]] = {"llama": {}, "mla": MLA, "experts": EXPERTS}
ACROSS = {"outer_dp_sharding_strategy": "optim"}
Layout = tuple[str, int, dict[str, Any], dict[str, Any]]
LAYOUTS: list[Layout] = [
    ("llama", 2, {"strategy": "no_shard"}, {}),
    ("llama", 4, {"tp": 4, "strategy": "no_shard"}, {}),
    ("llama", 4, {"tp": 2, "strategy": "optim"}, SP),
    ("llama", 4, {"pp": 2, "strategy": "optim_grads"}, ZB),
    ("llama", 4, {"instances": 2, "strategy": "optim_grads"}, ACROSS),
    ("experts", 4, {"tp": 2, "etp": 2, "strategy": "optim_grads_params"}, {}),
    ("experts", 4, {"ep": 2, "instances": 2, "strategy": "optim"}, {}),
]
MLA_LAYOUTS: list[Layout] = [
    ("mla", 4, {"tp": 2, "strategy": "optim_grads"}, SP),
    ("mla", 4, {"cp": 2, "strategy": "optim_grads_params"}, {}),
]
ROWS = [("heads", layout) for layout in (*LAYOUTS, *MLA_LAYOUTS)]
ROWS += [("normuon", layout) for layout in (*LAYOUTS, MLA_LAYOUTS[0])]
ROWS += [(rule, layout) for rule in ("muon_h", "adam_h") for layout in LAYOUTS]
ROWS += [("gram", layout) for layout in (*LAYOUTS[1:4], *LAYOUTS[5:], MLA_LAYOUTS[0])]


def case_of(rule: str, model: str) -> Case:
    optim = RULES[rule] | {"lr": LR, "adam_eps": 1e-4}
    return Case(STEPS).but(optim=optim, model=MODELS[model])


def in_layout(rule: str, layout: Layout, model: str) -> tuple[Case, int, dict[str, Any]]:
    """The case of a layout, its number of ranks, and its sizes."""
    _, num_ranks, sizes, options = layout
    parallel = {SHORT_NAMES[name]: value for name, value in sizes.items()} | options
    case = case_of(rule, model).but(parallel=parallel, train={"micro_batch_size": 3})
    return case, num_ranks, sizes


@cache
def single_rank(rule: str, model: str) -> list[Outcome]:
    case = case_of(rule, model).but(train={"micro_batch_size": GLOBAL_BATCH})
    return run_ranks(1, train_here, case, shares=True)


@pytest.mark.parametrize(("rule", "layout"), ROWS, ids=str)
def test_a_layout_trains_as_one_rank_does(rule: str, layout: Layout) -> None:
    model = layout[0]
    case, num_ranks, sizes = in_layout(rule, layout, model)
    outcomes = run_ranks(num_ranks, train_here, case, **sizes, shares=True)
    # the bound of weights is a share of an update of the size lr
    lr = LR * SIZES_OF_UPDATES.get(rule, 0.1)
    assert_alike(outcomes, single_rank(rule, model), row=f"{rule} {layout}", lr=lr)


WITH_STATE = ("normuon", "muon_h", "adam_h")
SAVED = Path("checkpoints", "step-00000002")
# the layout that saves, the one that resumes, as rows of LAYOUTS
RESUMES = [(2, 5), (5, 4), (4, 3)]


def save_and_go_on(ctx: ParallelContext, case: Case, folder: Path) -> list[float]:
    """Two steps, a checkpoint, two more steps; returns the last losses."""
    run = build_here(ctx, case, folder=folder)
    train(run, 2)
    save_step(ctx, run)
    return train(run, 2)


def resume(ctx: ParallelContext, case: Case, folder: Path) -> list[float]:
    """The losses of two steps from the checkpoint."""
    return train(build_here(ctx, case, checkpoint=folder / SAVED, folder=folder), 2)


@pytest.mark.parametrize(("rule", "index"), [(rule, i) for i, rule in enumerate(WITH_STATE)])
def test_another_layout_resumes(rule: str, index: int, tmp_path: Path) -> None:
    """State of whole matrices is saved by its owner and read by the owner of another layout."""
    writer, reader = (LAYOUTS[number] for number in RESUMES[index])
    saving, num_ranks, sizes = in_layout(rule, writer, "experts")
    losses = run_ranks(num_ranks, save_and_go_on, saving, tmp_path, **sizes, shares=True)[0]
    case, num_ranks, sizes = in_layout(rule, reader, "experts")
    resumed = run_ranks(num_ranks, resume, case, tmp_path, **sizes, shares=True)[0]
    assert resumed == pytest.approx(losses, rel=1e-5)
    same = run_ranks(writer[1], resume, saving, tmp_path, **writer[2], shares=True)[0]
    assert same == losses, "the same layout resumes to the bit"


@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads_params"])
def test_bytes_of_state_are_the_planned(strategy: str) -> None:
    """Law L5: state of elements and of whole matrices, and the messages of matrices."""
    sizes = {"tp": 2, "strategy": strategy}
    parallel = {SHORT_NAMES[name]: value for name, value in sizes.items()}
    cases = []
    for rule in ("heads", *WITH_STATE):
        fields = {key: value for key, value in RULES[rule].items() if "prec" not in key}
        case = Case(1).but(optim=fields, precision={"params_dtype": "bf16"})
        cases.append(case.but(parallel=parallel, train={"micro_batch_size": 6}))
    for results in run_ranks(4, bytes_of, cases, **sizes, shares=True):
        for case, (allocated, planned, sent, planned_sent) in zip(cases, results, strict=True):
            name = case.overrides["optim"]["optimizer"]
            assert allocated == planned, name
            assert sent == planned_sent, name
            assert bool(sent) == (name != "adam_h"), name
