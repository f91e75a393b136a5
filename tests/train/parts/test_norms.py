"""Norms are those by hand, of every layout alike; those by group sum to the norms of the whole
model.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.train.hooks.log import LogHook
from nanotrain.train.hooks.track import TrackHook
from nanotrain.train.parts.norms import KINDS
from nanotrain.train.step import train_step
from nanotrain.train.trackers.table import TRACKERS, TrackerRow
from tests.harness import SHORT_NAMES, run_ranks
from tests.laws.command_line import arguments, run_command_lines
from tests.laws.worlds import GLOBAL_BATCH, Case, build_here
from tests.train.small_run import Spy, metrics_of, small_run, train

MOE = {"num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 32, "qk_layernorm": True}
GROUPS = ["embedding", "norms", "attention", "mlp", "experts", "head"]
UNTIED = MOE | {
    "untie_embeddings_and_output_weights": True,
    "moe_shared_expert_intermediate_size": 24,
}
LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (2, {"tp": 2, "strategy": "optim", "sequence_parallel": True}),
    (2, {"pp": 2, "strategy": "no_shard"}),
    (4, {"ep": 2, "instances": 2, "strategy": "optim_grads", "ddp_average_in_collective": True}),
]


def case_of(sizes: dict[str, Any], micro_batch_size: int, model: dict[str, Any]) -> Case:
    return Case(1).but(
        parallel={SHORT_NAMES.get(name, name): value for name, value in sizes.items()},
        train={"micro_batch_size": micro_batch_size, "log_norms_by_group": True},
        model=model,
        optim={"adam_eps": 1e-4},
    )


def step_of(
    ctx: ParallelContext, case: Case
) -> tuple[float, dict[str, dict[str, float]], dict[str, dict[str, float]]]:
    """The gradient norm and the norms of one step, and those of this rank's full tensors by hand,
    before and after.
    """
    run = build_here(ctx, case)

    def params() -> dict[str, Tensor]:
        return {
            name: p.detach().clone()
            for stage in run.stages.values()
            for name, p in stage.named_parameters()
        }

    before, batch = params(), run.batch_iterator.next()
    assert batch is not None
    result = train_step(run, batch)
    for dp in run.data_parallel:
        dp.wait_for_params()
    after = params()
    tensors = {"param": after, "update": {name: after[name] - before[name] for name in after}}
    by_hand = {
        kind: {
            group: norm_of([each[name] for name in each if group_of(name) == group])
            for group in GROUPS
        }
        for kind, each in tensors.items()
    }
    return result.grad_norm, result.metrics["norms"], by_hand


def norm_of(tensors: list[Tensor]) -> float:
    return sum(float(tensor.double().square().sum()) for tensor in tensors) ** 0.5


def group_of(name: str) -> str:
    """The group of a parameter, from its name."""
    if name.split(".")[0] in ("embedding", "head"):
        return name.split(".")[0]
    if "norm" in name:
        return "norms"
    return "experts" if ".experts." in name else "attention" if ".attention." in name else "mlp"


@pytest.mark.parametrize("model", [UNTIED, {}], ids=["experts", "tied"])
def test_every_layout_has_the_norms_of_one_rank_which_are_those_by_hand(
    model: dict[str, Any],
) -> None:
    ((grad_norm, single, by_hand),) = run_ranks(
        1, step_of, case_of({}, GLOBAL_BATCH, model), threads=True
    )
    assert list(single) == list(KINDS)
    expected = {name: norm for name, norm in by_hand["param"].items() if norm}
    assert single["param"] == pytest.approx(expected, rel=1e-5) and len(expected) == (
        6 if model else 4
    )
    assert single["update"] == pytest.approx(
        {name: by_hand["update"][name] for name in expected}, rel=1e-4
    )
    whole = sum(norm**2 for norm in single["grad"].values()) ** 0.5
    assert whole == pytest.approx(grad_norm, rel=1e-6), "before clipping"
    for num_ranks, sizes in LAYOUTS if model else LAYOUTS[:2]:
        axes = {name: value for name, value in sizes.items() if name != "sequence_parallel"}
        results = run_ranks(num_ranks, step_of, case_of(sizes, 3, model), threads=True, **axes)
        for _, norms, _ in results:
            for kind in KINDS:
                assert norms[kind] == pytest.approx(single[kind], rel=1e-3), (sizes, kind)


def test_only_logged_steps_measure_and_the_files_name_them(tmp_path, monkeypatch):
    written: dict[int, dict[str, Any]] = {}

    class Recorder:
        def write(self, step: int, values: dict[str, Any]) -> None:
            written[step] = values

        def close(self, *, failed: bool) -> None:
            pass

    monkeypatch.setitem(
        TRACKERS, "tensorboard", TrackerRow(lambda run: Recorder(), setting="tensorboard")
    )
    flags = (
        "--train-iters",
        "4",
        "--log-interval",
        "2",
        "--save-interval",
        "0",
        "--log-norms-by-group",
    )
    fp16 = ("--fp16", "--initial-loss-scale", "1024", "--tensorboard")
    with small_run(tmp_path, *flags, *fp16) as run:
        train(run, LogHook(), TrackHook())
    rows = metrics_of(tmp_path)
    assert ["norms" in row for row in rows] == [False, True, False, True]
    grads = rows[1]["norms"]["grad"]
    assert sum(norm**2 for norm in grads.values()) ** 0.5 == pytest.approx(
        rows[1]["grad_norm"], rel=1e-5
    )
    assert written[2]["norms/update/attention"] == rows[1]["norms"]["update"]["attention"] > 0
    assert torch.isfinite(torch.tensor(list(rows[3]["norms"]["param"].values()))).all()


LOGGED = "--log-params-norm --log-num-zeros-in-grad --log-max-attention-logit"


def test_the_norm_of_all_and_the_zeros_are_those_by_hand(tmp_path: Path) -> None:
    spy = Spy()
    with small_run(tmp_path, "--train-iters", "1", *LOGGED.split()) as run:
        train(run, spy)
        params = [param for stage in run.stages.values() for param in stage.parameters()]
        grads = [grad for state in run.optimizer._states for grad in [state.grads]]
        gaps = sum(grad.numel() for grad in grads) - sum(param.numel() for param in params)
        zeros = sum(int((grad == 0).sum()) for grad in grads)
    assert gaps > 0 and spy.reports[0].output.metrics["num_zeros_in_grad"] == zeros - gaps > 0
    norm = torch.cat([param.detach().double().flatten() for param in params]).norm().item()
    assert spy.reports[0].output.metrics["params_norm"] == pytest.approx(norm, rel=1e-6)


TP, PP, CP = (f"--{name}-parallel-size" for name in ("tensor-model", "pipeline-model", "context"))
SHARDED = "--data-parallel-sharding-strategy optim_grads"
# name -> sizes of the axes, command line; embeddings are tied, so ends of a pipeline share one
TIED_LAYOUTS: dict[str, tuple[dict[str, Any], str]] = {
    "tp": ({"tp": 2, "strategy": "optim_grads"}, f"{TP} 2 --sequence-parallel {SHARDED}"),
    "pp": ({"pp": 2}, f"{PP} 2"),
    "pp, sharded": ({"pp": 2, "strategy": "optim_grads"}, f"{PP} 2 {SHARDED}"),
    "pp tp": ({"pp": 2, "tp": 2}, f"{PP} 2 {TP} 2"),
    "cp": ({"cp": 2, "strategy": "optim_grads"}, f"{CP} 2 {SHARDED}"),
}


def test_layouts_agree_on_the_norm_of_all_the_zeros_and_the_largest_logit(tmp_path: Path) -> None:
    """Every element is counted once: the tied embedding too, though two stages hold it."""
    steps = "--train-iters 2 --micro-batch-size 2 --log-interval 1"
    run_ranks(1, run_command_lines, arguments(tmp_path / "one", steps, LOGGED))
    single_rank = metrics_of(tmp_path / "one")
    assert single_rank[0]["max_attention_logit"] != single_rank[1]["max_attention_logit"], (
        "each step starts anew"
    )
    for name, (sizes, flags) in TIED_LAYOUTS.items():
        folder = tmp_path / name
        run_ranks(4, run_command_lines, arguments(folder, steps, LOGGED, flags), **sizes)
        for row, expected in zip(metrics_of(folder), single_rank, strict=True):
            assert row["params_norm"] == pytest.approx(expected["params_norm"], rel=1e-6), name
            assert row["num_zeros_in_grad"] == expected["num_zeros_in_grad"] > 0, name
            assert row["max_attention_logit"] == pytest.approx(
                expected["max_attention_logit"], rel=1e-4
            ), name
