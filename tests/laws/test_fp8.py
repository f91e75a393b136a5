"""Laws L1 and L4 with fp8 products: a layout has the scales, and so the products, of one rank.

Parameters are fp32, so layouts differ by the order of fp32 sums, as without fp8. Where that moves a
value across the border between two fp8 numbers, it changes by up to 6 % (e4m3), for about one value
in 2^20. The first step has the tolerances of all other layouts. A scale of a shard in place of that
of the tensor exceeds them: it changes every value, measured 4e-4 to 9e-4 of the first gradient
norm. Later steps, with some values rounded otherwise, get 1e-3 of the loss and 1e-2 of the norm;
measured up to 8e-5 and 3e-3.

Rows rounded by power-of-two scales (rowwise, blockwise, mxfp8) need no scale in common: values
above the underflow are the same for every scale.

NVFP4 has the values of one rank, random ones included, where the blocks of 16 tokens of wgrad are
those of one rank: with tp, and with cp and chunks of a multiple of 16 tokens. The tokens of an
expert arrive in the order of the layout, so there wgrad has other blocks and other random words:
measured 3e-3 and 5e-3 of the first gradient norm, within 1e-2.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.plan.buffers import BufferPlan
from nanotrain.plan.traffic import sent_bytes
from nanotrain.spec.boxes import TensorBox
from nanotrain.train.hooks.checkpoint import CheckpointHook
from nanotrain.train.parts.fp8_amaxes import fp8_layers
from nanotrain.train.run import Run
from nanotrain.train.step import train_step
from tests.harness import SHORT_NAMES, run_ranks
from tests.laws.compare import LOSS_TOLERANCE, NORM_TOLERANCE
from tests.laws.worlds import Case, build_here, held_weights

STEPS = 2
LATER_LOSS, LATER_NORM = 1e-3, 1e-2
HISTORY_TOLERANCE = 1e-3  # a value rounded otherwise changes what depends on it
MODEL = {"hidden_size": 64, "ffn_hidden_size": 96, "kv_channels": 16}
EXPERTS = {
    "num_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 32,
    "moe_aux_loss_coeff": 1e-2,
}
FORMATS = {"mxfp8": "e4m3", "nvfp4": "e2m1"}  # others: hybrid
SP, ZB = {"sequence_parallel": True}, {"pipeline_schedule": "zb-h1"}
GATHER, OVERLAP = (
    {"cp_comm_type": "allgather"},
    {"overlap_grad_reduce": True, "overlap_param_gather": True},
)


@dataclass(frozen=True)
class Row:
    """A recipe, a model and a layout."""

    recipe: str
    model: str
    ranks: int
    strategy: str
    sizes: dict[str, int] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    norm: float = NORM_TOLERANCE  # of the first step

    def __str__(self) -> str:
        sizes = [f"{axis}{size}" for axis, size in self.sizes.items()]
        return " ".join(
            [self.recipe, self.model, f"{self.ranks} ranks", self.strategy, *sizes, *self.options]
        )


ROWS = [
    Row("tensorwise", "dense", 4, "optim", {"tp": 2}, SP | OVERLAP),
    Row("tensorwise", "dense", 2, "optim_grads_params", {"cp": 2}, GATHER | OVERLAP),
    Row("tensorwise", "experts", 2, "optim_grads", {"tp": 2, "etp": 2}),
    Row("tensorwise", "experts", 2, "optim", {"cp": 2}, GATHER),
    Row("delayed", "dense", 4, "optim_grads", {"tp": 2, "pp": 2}, ZB),
    Row("delayed", "experts", 4, "optim", {"tp": 2, "etp": 1, "ep": 2}, SP),
    Row("rowwise", "dense", 2, "optim_grads_params", {}, OVERLAP),
    Row("mxfp8", "experts", 2, "optim", {"cp": 2, "ep": 2}, GATHER),
    Row("nvfp4", "dense", 4, "optim", {"tp": 2}, SP | OVERLAP),
    Row("nvfp4", "dense", 2, "optim_grads_params", {"cp": 2}, GATHER),
    Row("nvfp4", "experts", 2, "optim", {"cp": 2, "ep": 2}, GATHER, norm=1e-2),
]


@dataclass(frozen=True)
class Trained:
    """What a rank saw."""

    losses: list[float]
    grad_norms: list[float]
    histories: list[dict[str, torch.Tensor]]  # after each step, by layer


def case_of(row: Row) -> Case:
    formats = {"fp8_format": FORMATS.get(row.recipe, "hybrid"), "fp8_recipe": row.recipe}
    if row.recipe == "delayed":
        formats |= {"fp8_amax_history_len": 2, "fp8_amax_compute_algo": "max"}
    parallel = {SHORT_NAMES[axis]: size for axis, size in row.sizes.items()} | row.options
    # chunks of cp with whole blocks of 16 tokens
    data = {"seq_length": 64} if row.recipe == "nvfp4" else {}
    return Case(steps=STEPS).but(
        model=MODEL | (EXPERTS if row.model == "experts" else {}),
        precision=formats,
        data=data,
        optim={"lr": 3e-3, "adam_eps": 1e-5},
        train={"micro_batch_size": 2, "global_batch_size": 4},
        parallel=parallel | {"data_parallel_sharding_strategy": row.strategy},
    )


def train_fp8(ctx: ParallelContext, case: Case) -> Trained:
    run = build_here(ctx, case)
    trained = Trained([], [], [])
    for _ in range(case.steps):
        batch = run.batch_iterator.next()
        assert batch is not None
        result = train_step(run, batch)
        trained.losses.append(result.loss)
        trained.grad_norms.append(result.grad_norm)
        layers = [layer for stage in run.stages.values() for layer in fp8_layers(stage).items()]
        trained.histories.append(
            {name: layer.history.clone() for name, layer in layers if layer.history is not None}
        )
    return trained


@cache
def on_one_rank(recipe: str, model: str) -> Trained:
    (trained,) = run_ranks(1, train_fp8, case_of(Row(recipe, model, 1, "no_shard")), shares=True)
    return trained


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_a_layout_has_the_scales_of_one_rank(row: Row) -> None:
    expected = on_one_rank(row.recipe, row.model)
    replies = run_ranks(
        row.ranks,
        train_fp8,
        case_of(row),
        strategy=row.strategy,
        **row.sizes,
        **row.options,
        shares=True,
    )
    for found in replies:
        assert found.losses == replies[0].losses and found.grad_norms == replies[0].grad_norms
    first = replies[0]
    assert first.losses[0] == pytest.approx(expected.losses[0], rel=LOSS_TOLERANCE)
    assert first.grad_norms[0] == pytest.approx(expected.grad_norms[0], rel=row.norm)
    assert first.losses == pytest.approx(expected.losses, rel=LATER_LOSS)
    assert first.grad_norms == pytest.approx(expected.grad_norms, rel=LATER_NORM)
    merged: dict[str, torch.Tensor] = {}
    for found in replies:
        for name, history in found.histories[-1].items():
            assert torch.equal(merged.setdefault(name, history), history), (
                f"{name} differs between ranks"
            )
    assert merged.keys() == expected.histories[-1].keys()
    after_first = {
        name: history for found in replies for name, history in found.histories[0].items()
    }
    for name, history in after_first.items():
        reference = expected.histories[0][name]
        torch.testing.assert_close(
            history, reference, rtol=HISTORY_TOLERANCE, atol=0, msg=f"{row}: {name}"
        )


def save_and_load(
    ctx: ParallelContext, case: Case, folder: Path, checkpoint: Path | None
) -> dict[str, torch.Tensor]:
    """The histories after a step that was saved, or after that checkpoint was loaded."""
    run = build_here(ctx, case, folder=folder, checkpoint=checkpoint)
    if checkpoint is None:
        batch = run.batch_iterator.next()
        assert batch is not None
        train_step(run, batch)
        CheckpointHook().after_training(run)
    layers = [layer for stage in run.stages.values() for layer in fp8_layers(stage).items()]
    assert all(layer.has_history for _, layer in layers)
    return {name: layer.history.clone() for name, layer in layers if layer.history is not None}


def test_any_layout_loads_the_history_of_any_other(tmp_path: Path) -> None:
    """Law L4."""
    row = Row("delayed", "experts", 2, "optim", {"tp": 2, "etp": 1, "ep": 2}, SP)
    saved = run_ranks(
        2,
        save_and_load,
        case_of(row),
        tmp_path,
        None,
        strategy="optim",
        **row.sizes,
        **row.options,
        shares=True,
    )[0]
    (checkpoint,) = (tmp_path / "checkpoints").glob("step-*")
    other = Row("delayed", "experts", 2, "no_shard", {"pp": 2})
    loaded = run_ranks(2, save_and_load, case_of(other), tmp_path, checkpoint, pp=2, shares=True)
    assert len(loaded[0].keys() & loaded[1].keys()) == 0
    merged = loaded[0] | loaded[1]
    assert merged.keys() == saved.keys()
    assert all(torch.equal(merged[name], history) for name, history in saved.items())
    assert saved["layers.1.mlp.experts.up.fp8"].shape == (3, 4, 2)


@dataclass
class Gathered:
    """A run with or without `--fp8-param-gather`."""

    losses: list[float]
    norms: list[float]
    weights: dict[TensorBox, torch.Tensor]
    resident: int  # bytes of parameters, and of what the optimizer writes
    planned_resident: int
    sent: dict[tuple[str, str], int]  # in one step
    planned_sent: dict[tuple[str, str], int]
    fp8_share: float  # of the elements that are gathered
    resumed: float = 0.0  # first loss after loading what the other run saved


def train_gathered(ctx: ParallelContext, cases: list[Case], folder: Path) -> list[Gathered]:
    runs = [_train_gathered(ctx, case, folder / str(i)) for i, case in enumerate(cases)]
    for i, case in enumerate(cases):
        (checkpoint,) = (folder / str(1 - i) / "checkpoints").glob("step-*")
        runs[i].resumed = _train_steps(build_here(ctx, case, checkpoint=checkpoint), 1)[0][0]
    return runs


def _train_steps(run: Run, steps: int) -> tuple[list[float], list[float]]:
    results = []
    for _ in range(steps):
        run.context.traffic.reset()
        batch = run.batch_iterator.next()
        assert batch is not None
        results.append(train_step(run, batch))
    return [result.loss for result in results], [result.grad_norm for result in results]


def _train_gathered(ctx: ParallelContext, case: Case, folder: Path) -> Gathered:
    run = build_here(ctx, case, folder=folder)
    losses, norms = _train_steps(run, case.steps)
    keys = [
        (group, op)
        for group in ("dp_shard", "expert_dp_shard")
        for op in ("all_gather", "all_reduce")
    ]
    sent, planned = {key: ctx.traffic.bytes(*key) for key in keys}, sent_bytes(run.plan)
    updates = [dp.update_buffer for dp in run.data_parallel if dp.update_buffer is not None]
    CheckpointHook().after_training(run)
    buffers, gathers_again = run.plan.buffers, run.plan.data_parallel.strategy.shard_params

    def gathered(buffers: Iterable[BufferPlan]) -> int:  # embedding and head for the forward only
        buckets = [bucket for buffer in buffers for bucket in buffer.layout.buckets]
        return sum(
            each.numel * (1 + (gathers_again and not each.units & {"embedding", "head"}))
            for each in buckets
        )

    return Gathered(
        losses,
        norms,
        held_weights(run),
        resident=sum(
            tensor.nbytes for tensor in (*(dp.param_buffer for dp in run.data_parallel), *updates)
        ),
        planned_resident=run.plan.resident_bytes.params,
        sent=sent,
        planned_sent={key: planned.get(key, 0) for key in keys},
        fp8_share=gathered(buffer for buffer in buffers if buffer.is_fp8) / gathered(buffers),
    )


GATHER_ROWS = [
    Row("tensorwise", "dense", 2, "optim", {"tp": 2}, {"overlap_param_gather": True}),
    Row("delayed", "experts", 2, "optim_grads_params", {}, OVERLAP | {"fsdp_double_buffer": True}),
]


@pytest.mark.parametrize("row", GATHER_ROWS, ids=str)
def test_a_gather_of_fp8_weights_changes_no_bit_and_sends_half(row: Row, tmp_path: Path) -> None:
    """Losses, weights and checkpoints of runs with and without `--fp8-param-gather`, and bytes as
    planned (L5).

    Without clipping: the norm is a sum over buckets, which the flag divides otherwise.
    """
    formats = {"params_dtype": "bf16", "fp8_format": "e4m3"}
    untied = {"untie_embeddings_and_output_weights": True}
    plain = case_of(row).but(model=untied, optim={"clip_grad": 0.0}, precision=formats)
    cases = [plain, plain.but(precision={"fp8_param_gather": True})]
    options = {"strategy": row.strategy} | row.sizes | row.options
    for without, fp8 in run_ranks(
        row.ranks, train_gathered, cases, tmp_path, **options, shares=True
    ):
        assert fp8.losses == without.losses and fp8.resumed == without.resumed
        assert fp8.norms == pytest.approx(without.norms, rel=1e-6)
        assert all(torch.equal(fp8.weights[box], weight) for box, weight in without.weights.items())
        assert without.fp8_share == 0 and fp8.fp8_share > 0.2
        for run in (without, fp8):
            assert run.resident == run.planned_resident and run.sent == run.planned_sent
        gathered, in_bf16 = (
            sum(count for (_, op), count in run.sent.items() if op == "all_gather")
            for run in (fp8, without)
        )
        assert gathered == pytest.approx((1 - fp8.fp8_share / 2) * in_bf16, rel=0.03)  # padding
