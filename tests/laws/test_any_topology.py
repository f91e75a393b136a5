"""Laws 3 and 4 over all axes: what one topology saves, any other loads, to the bit, and goes on as if never stopped."""

from pathlib import Path
from typing import Any

import pytest
import torch

from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.config.schema import to_dict
from nanotrain.topology.boxes import TensorBox
from nanotrain.train.routers import router_biases, router_biases_to_save
from nanotrain.train.run import Run
from nanotrain.train.step import train_step
from tests.harness import SHORT_NAMES, run_ranks
from tests.laws.worlds import Case, build_here

MODEL = {
    "num_layers": 4,
    "num_experts": 4,
    "moe_layer_freq": "2",
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "qk_layernorm": True,
}
Pieces = dict[TensorBox, torch.Tensor]
SP = {"sequence_parallel": True}
# name -> ranks, sizes, options
TOPOLOGIES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "one": (1, {"strategy": "no_shard"}, {}),
    "dp4 ep2": (4, {"strategy": "optim_grads", "ep": 2}, {}),
    "tp2 pp2": (4, {"strategy": "optim", "tp": 2, "pp": 2, "etp": 2}, SP),
    "tp2 pp2 dp2 ep2": (8, {"strategy": "optim", "tp": 2, "pp": 2, "etp": 1, "ep": 2}, {"ddp_bucket_size": 5000}),
    "pp2 vpp2 cp2": (
        4,
        {"strategy": "no_shard", "pp": 2, "cp": 2},
        {"pipeline_schedule": "interleaved", "num_virtual_stages_per_pipeline_rank": 2},
    ),
}


def case_of(name: str) -> Case:
    _, sizes, options = TOPOLOGIES[name]
    parallel = {SHORT_NAMES[key]: value for key, value in sizes.items()} | options
    return Case().but(train={"micro_batch_size": 1}, parallel=parallel, model=MODEL)


def everything(run: Run) -> Pieces:
    held = run.optimizer.state_tensors() | router_biases(run.stages)
    return {place: tensor.clone() for place, tensor in held.items()}


def train(run: Run, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        batch = run.batch_iterator.next()
        assert batch is not None
        losses.append(train_step(run, batch).loss)
    return losses


def save(ctx: ParallelContext, case: Case, folder: Path) -> tuple[Pieces, list[float]]:
    """Two steps, a checkpoint, two more steps."""
    run = build_here(ctx, case, folder=folder)
    train(run, 2)
    run.checkpointer.save(
        2,
        run.optimizer.tensors_to_save() | router_biases_to_save(run.stages, ctx),
        objects={"train": run.state.to_dict(), "optimizer": run.optimizer.state_dict()},
        config=to_dict(run.config),
        topology={},
    )
    return everything(run), train(run, 2)


def load(ctx: ParallelContext, case: Case, folder: Path) -> tuple[Pieces, list[float]]:
    """What the checkpoint gives, and two steps from there."""
    run = build_here(ctx, case, checkpoint=folder / "checkpoints" / "step-00000002", folder=folder)
    return everything(run), train(run, 2)


def rates(ctx: ParallelContext, case: Case, folder: Path) -> list[float]:
    run = build_here(ctx, case, checkpoint=folder / "checkpoints" / "step-00000002", folder=folder)
    return [run.lr_schedule.lr_at(consumed) for consumed in range(0, 60, 6)]


def joined(pieces: list[Pieces]) -> dict[str, torch.Tensor]:
    whole: dict[str, torch.Tensor] = {}
    for place, tensor in (item for held in pieces for item in held.items()):
        target = whole.setdefault(place.name, torch.full(place.shape, float("nan")))
        target[place.box.slices()] = tensor.float()
    return whole


@pytest.mark.parametrize("saved", TOPOLOGIES)
def test_any_topology_loads_what_any_other_saved(saved: str, tmp_path: Path) -> None:
    ranks, sizes, _ = TOPOLOGIES[saved]
    stopped = run_ranks(ranks, save, case_of(saved), tmp_path, **sizes)
    expected, losses = joined([held for held, _ in stopped]), stopped[0][1]
    assert not any(tensor.isnan().any() for tensor in expected.values())
    for other, (other_ranks, other_sizes, _) in TOPOLOGIES.items():
        resumed = run_ranks(other_ranks, load, case_of(other), tmp_path, **other_sizes)
        found = joined([held for held, _ in resumed])
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(found[name], tensor), f"{saved} -> {other}: {name}"
        if other == saved:
            assert resumed[0][1] == losses, "the same topology goes on to the bit"
        assert resumed[0][1] == pytest.approx(losses, rel=1e-5), f"{saved} -> {other}"


def test_another_batch_size_goes_on_along_the_same_learning_rates(tmp_path: Path) -> None:
    case = case_of("one").but(optim={"lr_warmup_iters": 2, "lr_decay_iters": 4})
    run_ranks(1, save, case, tmp_path)
    smaller = case.but(train={"global_batch_size": 6})
    before, after = (run_ranks(1, rates, one, tmp_path)[0] for one in (case, smaller))
    assert before == after and len(set(before)) > 5
