"""A small model trained for a few steps on this rank, through the same build and step that the
command line uses.

`train_here(ctx, case)` is what law tests run on every rank; `Outcome` is what they compare between
worlds.
"""

import json
import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.config.config import CheckpointConfig, Config, DataConfig, OptimConfig, TrainConfig
from nanotrain.config.model import ModelConfig
from nanotrain.config.parallel import ParallelConfig
from nanotrain.config.schema import KEYS, convert, flatten, with_values
from nanotrain.data.batch import Sample
from nanotrain.data.build import DatasetSplits
from nanotrain.errors import ErrorCollector
from nanotrain.plan.plan import Plan, plan_run
from nanotrain.runs.folder import RunFolder
from nanotrain.spec.boxes import TensorBox
from nanotrain.topology.topology import Topology
from nanotrain.train.build import build_run
from nanotrain.train.run import Run, RunInputs
from nanotrain.train.step import StepOutput, train_step

VOCAB_SIZE = 300  # no multiple of 128: padding takes part
SEQ_LENGTH = 24
MODEL = ModelConfig(
    num_layers=2,
    hidden_size=40,
    ffn_hidden_size=56,
    num_attention_heads=4,
    num_query_groups=2,
    vocab_size=VOCAB_SIZE,
)
GLOBAL_BATCH, LR = 12, 1e-2
# Several buckets, none of them a multiple of any rank count used here.
BUCKET_SIZE = 9000
_PLANNING = threading.Lock()  # ranks that are threads read the configuration of a case once
NOT_WRITTEN = Path("/dev/null/run")  # the folder of runs that save nothing


@dataclass(frozen=True)
class UnevenDataset:
    """Random tokens of which each sample masks another share, so ranks and microbatches count
    differently many.

    `reads` are the numbers of the samples that were read, in order. With documents each sample has
    other borders.
    """

    samples_per_epoch: int = 1000
    has_documents: bool = False
    reads: list[int] = field(default_factory=list)
    seq_length: int = SEQ_LENGTH

    def __getitem__(self, sample_number: int) -> Sample:
        self.reads.append(sample_number)
        draw = np.random.default_rng(sample_number)
        stream = draw.integers(0, VOCAB_SIZE, self.seq_length + 1)
        mask = (draw.random(self.seq_length) < draw.random()).astype(np.float32)
        documents = (
            np.cumsum(draw.random(self.seq_length) < 0.15, dtype=np.int32)
            if self.has_documents
            else None
        )
        return Sample(tokens=stream[:-1], labels=stream[1:], loss_mask=mask, segment_ids=documents)


@dataclass(frozen=True)
class Case:
    """What is trained: overrides of a section's fields by section name, and for how many steps."""

    steps: int = 4
    overrides: dict[str, dict[str, Any]] = field(default_factory=dict)

    def but(self, **sections: dict[str, Any]) -> "Case":
        """This case with further overrides."""
        merged = {
            name: self.overrides.get(name, {}) | sections.get(name, {})
            for name in {*self.overrides, *sections}
        }
        return replace(self, overrides=merged)


@dataclass(frozen=True)
class Outcome:
    """What a rank saw and holds at the end.

    Attributes:
        losses, grad_norms: one per step.
        weights: its pieces of the parameters.
        dp: its place among the data-parallel ranks.
        reads: the numbers of the samples it read, in order.
        bytes_sent: by group.
        moe: metrics of the routers, of every step; empty for a dense model.
        mtp_losses: of every step, by layer of multi-token prediction.
    """

    losses: list[float]
    grad_norms: list[float]
    weights: dict[TensorBox, torch.Tensor]
    dp: int
    reads: list[int]
    bytes_sent: dict[str, int]
    moe: list[dict[str, Any]]
    mtp_losses: list[list[float]]


def micro_batch_size(
    num_ranks: int,
    sizes: Mapping[str, Any],
    microbatches: int = 3,
    *,
    global_batch: int = GLOBAL_BATCH,
) -> int:
    """Of so many microbatches on each rank; `sizes` are those of the axes by short name."""
    num_data_parallel = num_ranks // math.prod(sizes.get(axis, 1) for axis in ("tp", "pp", "cp"))
    assert global_batch % (num_data_parallel * microbatches) == 0, (num_ranks, sizes, microbatches)
    return global_batch // num_data_parallel // microbatches


BASE = Config(
    model=MODEL,
    data=DataConfig(seq_length=SEQ_LENGTH, num_workers=0, mock_data=True),
    optim=OptimConfig(lr=LR, lr_warmup_iters=0, clip_grad=0.5),
    train=TrainConfig(global_batch_size=GLOBAL_BATCH, seed=7),
    checkpoint=CheckpointConfig(save=False),
    # The fusion as on GPUs.
    parallel=ParallelConfig(ddp_bucket_size=BUCKET_SIZE, gradient_accumulation_fusion=True),
)


def config_of(case: Case) -> Config:
    """The configuration of a case; its parallel section must describe the topology that it runs on."""
    errors = ErrorCollector()
    overrides = {
        key: convert(KEYS[key], value) for key, value in flatten(case.overrides, errors=errors)
    }
    errors.raise_errors()
    return with_values(BASE, {"train.train_iters": case.steps} | overrides)


@cache
def _plan_of(overrides: str, steps: int, world_size: int, rank: int) -> Plan:
    """The plan of a case, made once for all runs of it in this process; the overrides are JSON, as
    a key.
    """
    return plan_run(_config_of(overrides, steps), world_size, rank=rank)


@cache
def _config_of(overrides: str, steps: int) -> Config:
    return config_of(Case(steps, json.loads(overrides)))


def build_here(
    ctx: ParallelContext, case: Case, *, checkpoint: Path | None = None, folder: Path | None = None
) -> Run:
    """Build the case's run on this rank."""
    key = json.dumps(case.overrides, sort_keys=True)
    with _PLANNING:
        plan = _plan_of(key, case.steps, ctx.topology.world_size, ctx.rank)
    data = plan.config.data
    samples = UnevenDataset(has_documents=data.reset_attention_mask, seq_length=data.seq_length)
    inputs = RunInputs(
        RunFolder(folder or NOT_WRITTEN),
        DatasetSplits(samples, None, None),
        checkpoint=checkpoint,
        is_resumed=checkpoint is not None,
    )
    return build_run(plan, inputs, context=ctx)


def train_here(ctx: ParallelContext, case: Case) -> Outcome:
    """Train a case on this rank."""
    run = build_here(ctx, case)
    ctx.traffic.reset()
    return outcome_of(run, train_steps(run, case.steps))


def train_steps(run: Run, steps: int) -> list[StepOutput]:
    """Steps of this rank."""
    results = []
    for _ in range(steps):
        batch = run.batch_iterator.next()
        assert batch is not None
        results.append(train_step(run, batch))
    return results


def outcome_of(run: Run, results: list[StepOutput]) -> Outcome:
    """What this rank holds after these steps."""
    source, ctx = run.inputs.datasets.train, run.context
    assert isinstance(source, UnevenDataset)
    return Outcome(
        losses=[result.loss for result in results],
        grad_norms=[result.grad_norm for result in results],
        weights=held_weights(run),
        dp=ctx.coords["dp"],
        reads=source.reads,
        bytes_sent={name: ctx.traffic.bytes(name) for name in ctx.groups},
        moe=[result.metrics.get("moe", {}) for result in results],
        mtp_losses=[result.metrics.get("mtp_losses", []) for result in results],
    )


def held_weights(run: Run) -> dict[TensorBox, torch.Tensor]:
    """What this rank holds of every parameter, complete."""
    held: dict[TensorBox, torch.Tensor] = {}
    for stage in run.runnable.values():
        named = dict(stage.module.named_parameters())
        for layer in stage.callbacks:
            with layer.gathered():
                for name, local in layer.params.items():
                    value = named[name].detach().float().clone()
                    first = held.setdefault(TensorBox(name, local.spec.shape, local.box), value)
                    assert torch.equal(first, value), f"replicas of {name} differ on a rank"
    return held


def assemble(outcomes: list[Outcome]) -> dict[str, torch.Tensor]:
    """The whole parameters by name; every copy of a piece must be the same to the bit."""
    pieces: dict[TensorBox, torch.Tensor] = {}
    for outcome in outcomes:
        for place, tensor in outcome.weights.items():
            first = pieces.setdefault(place, tensor)
            assert torch.equal(first, tensor), f"replicas of {place.name} {place.box} differ"
    whole = {place.name: torch.full(place.shape, float("nan")) for place in pieces}
    for place, tensor in pieces.items():
        whole[place.name][place.box.slices()] = tensor
    return whole


def train_cases(ctx: ParallelContext, cases: list[Case]) -> list[Outcome]:
    """Several cases one after the other on the same ranks."""
    return [train_here(ctx, case) for case in cases]


def train_layouts(ctx: ParallelContext, cases: list[Case]) -> list[Outcome]:
    """Cases of several layouts one after the other on the ranks of one world."""
    topologies = [Topology.of(config_of(case).parallel, ctx.topology.world_size) for case in cases]
    return [
        train_here(ParallelContext.attach(topology), case)
        for topology, case in zip(topologies, cases, strict=True)
    ]
