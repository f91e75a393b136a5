"""Laws L3 and L4 over all axes: every topology loads, to the bit, what any other saved, and resumes
with its losses.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.config.schema import to_dict
from nanotrain.spec.boxes import TensorBox
from nanotrain.train.resume.restore import restore
from nanotrain.train.run import Run
from nanotrain.train.step import train_step
from tests.harness import SHORT_NAMES, run_ranks
from tests.laws.worlds import Case, build_here

MODEL = {
    "num_layers": 2,
    "num_experts": 4,
    "moe_layer_freq": "2",
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "qk_layernorm": True,
    "mtp_num_layers": 1,
}
SP = {"sequence_parallel": True}
SAVED = Path("checkpoints", "step-00000002")
# name -> ranks, sizes, options
TOPOLOGIES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "one": (1, {"strategy": "no_shard"}, {}),
    "dp4 ep2": (4, {"strategy": "optim_grads", "ep": 2}, {}),
    "dp4 ep2, two instances": (
        4,
        {"strategy": "optim_grads", "ep": 2, "instances": 2},
        {"overlap_grad_reduce": True},
    ),
    "dp4 ep2, sharded parameters": (
        4,
        {"strategy": "optim_grads_params", "ep": 2},
        {"overlap_param_gather": True},
    ),
    "dp4 ep2, sharded across instances": (
        4,
        {"strategy": "optim_grads_params", "ep": 2, "instances": 2},
        {"outer_dp_sharding_strategy": "optim"},
    ),
    "tp2 pp2": (
        4,
        {"strategy": "optim", "tp": 2, "pp": 2, "etp": 2},
        SP | {"tp_comm_overlap": True},
    ),
    "tp2 pp2 dp2 ep2": (
        8,
        {"strategy": "optim", "tp": 2, "pp": 2, "etp": 1, "ep": 2},
        {"ddp_bucket_size": 5000},
    ),
    "pp2 vpp2 cp2": (
        4,
        {"strategy": "no_shard", "pp": 2, "cp": 2},
        {
            "pipeline_schedule": "interleaved",
            "num_virtual_stages_per_pipeline_rank": 2,
            "pipeline_model_parallel_layout": "Et|t|m|L",
        },
    ),
    "pp2, a V": (
        2,
        {"strategy": "optim", "pp": 2, "vpp": 2, "schedule": "zb-v"},
        {"pipeline_model_parallel_layout": "E|t|t|mL"},
    ),
}


State = dict[TensorBox, torch.Tensor]


@dataclass(frozen=True)
class Saved:
    """A checkpoint after two steps: its global tensors, what else is in it, and the loss of the
    step after it.
    """

    folder: Path
    tensors: dict[str, torch.Tensor]
    objects: dict[str, Any]
    losses: list[float]


def case_of(name: str) -> Case:
    num_ranks, sizes, options = TOPOLOGIES[name]
    parallel = {SHORT_NAMES[key]: value for key, value in sizes.items()} | options
    train = {
        "micro_batch_size": 1 if num_ranks == 8 or "ep" in sizes else 2,
        "global_batch_size": 4,
    }
    return Case().but(train=train, parallel=parallel, model=MODEL)


def state_of(run: Run) -> State:
    tensors = run.optimizer.state_tensors() | run.parts.tensors()
    return {box: tensor.clone() for box, tensor in tensors.items()}


def train(run: Run, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        batch = run.batch_iterator.next()
        assert batch is not None
        losses.append(train_step(run, batch).loss)
    return losses


def save(
    ctx: ParallelContext, case: Case, folder: Path
) -> tuple[State, dict[str, Any], list[float]]:
    """Two steps, a checkpoint, another step."""
    run = build_here(ctx, case, folder=folder)
    train(run, 2)
    save_step(ctx, run)
    return state_of(run), objects_of(run), train(run, 1)


def objects_of(run: Run) -> dict[str, Any]:
    """What a checkpoint has beside tensors."""
    return {"train": run.state.to_dict(), "optimizer": run.optimizer.state_dict()}


def save_step(ctx: ParallelContext, run: Run) -> None:
    """A checkpoint of the last step."""
    run.checkpointer.save(
        run.state.step,
        run.optimizer.tensors_to_save() | run.parts.tensors_to_save(),
        objects=objects_of(run),
        config=to_dict(run.config),
        topology={},
    )


def load(
    ctx: ParallelContext, case: Case, folders: dict[str, Path], trained: list[str]
) -> list[tuple[State, dict[str, Any], list[float]]]:
    """The state and the objects that each checkpoint gives, and the loss of a step from those to be
    trained.

    The others are loaded into the run that is there.
    """
    results, run = [], build_here(ctx, case)
    for name, folder in folders.items():
        run.wait_for_params()
        if name in trained:
            run = build_here(ctx, case, checkpoint=folder / SAVED, folder=folder)
        else:
            loaded = restore(
                folder / SAVED, run.checkpointer, model=run, parts=run.parts, may_fall_back=False
            )
            run = replace(run, state=loaded)
        results.append((state_of(run), objects_of(run), train(run, 1 if name in trained else 0)))
    return results


def learning_rates(ctx: ParallelContext, case: Case, folder: Path) -> list[float]:
    run = build_here(ctx, case, checkpoint=folder / SAVED, folder=folder)
    return [run.lr_schedule.lr_at(consumed) for consumed in range(0, 60, 6)]


def global_tensors(states: Iterable[State]) -> dict[str, torch.Tensor]:
    """The tensors of all ranks, NaN where no rank has an element."""
    tensors: dict[str, torch.Tensor] = {}
    for box, tensor in (item for state in states for item in state.items()):
        target = tensors.setdefault(box.name, torch.full(box.shape, float("nan")))
        target[box.box.slices()] = tensor.float()
    return tensors


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Saved]:
    """A checkpoint of every topology."""
    checkpoints = {}
    for name, (ranks, sizes, _) in TOPOLOGIES.items():
        folder = tmp_path_factory.mktemp("saved")
        results = run_ranks(ranks, save, case_of(name), folder, **sizes, shares=True)
        state = global_tensors(state for state, _, _ in results)
        checkpoints[name] = Saved(folder, state, *results[0][1:])
        assert not any(tensor.isnan().any() for tensor in state.values())
    return checkpoints


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_any_topology_loads_what_any_other_saved(saved: dict[str, Saved], topology: str) -> None:
    """Every pair has the state and the objects; with them equal, a step from two other writers
    shows that they do.
    """
    ranks, sizes, _ = TOPOLOGIES[topology]
    names = list(TOPOLOGIES)
    number = names.index(topology)
    trained = [topology, names[number - 1], names[number - 3]]
    folders = {name: one.folder for name, one in saved.items()}
    by_rank = run_ranks(ranks, load, case_of(topology), folders, trained, **sizes, shares=True)
    for (writer, checkpoint), results in zip(
        saved.items(), zip(*by_rank, strict=True), strict=True
    ):
        tensors = global_tensors(state for state, _, _ in results)
        assert tensors.keys() == checkpoint.tensors.keys()
        for name, tensor in checkpoint.tensors.items():
            assert torch.equal(tensors[name], tensor), f"{writer} -> {topology}: {name}"
        assert all(objects == checkpoint.objects for _, objects, _ in results), (
            f"{writer} -> {topology}"
        )
        losses = results[0][2]
        if topology == writer:
            assert losses == checkpoint.losses, "the same topology resumes to the bit"
        if writer in trained:
            assert losses == pytest.approx(checkpoint.losses, rel=1e-5), f"{writer} -> {topology}"


def test_another_batch_size_continues_the_same_learning_rate_schedule(tmp_path: Path) -> None:
    case = case_of("one").but(
        train={"global_batch_size": 12}, optim={"lr_warmup_iters": 2, "lr_decay_iters": 4}
    )
    run_ranks(1, save, case, tmp_path, shares=True)
    smaller = case.but(train={"global_batch_size": 6})
    before, after = (
        run_ranks(1, learning_rates, one, tmp_path, shares=True)[0] for one in (case, smaller)
    )
    assert before == after and len(set(before)) > 5
