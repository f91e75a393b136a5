"""Runs that change their layout while they go on, beside a stop and a resume in the new layout.

random_pair(n)       layouts of 2 to 8 ranks that a model may have, and that fit the batch
changed(ctx, ...)    trains to BORDER in one layout and on in another, without a file in between
resumed(ctx, ...)    the same with a checkpoint at BORDER, which is loaded in the other layout
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from nanotrain.comm.group import Group
from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.config.load import load
from nanotrain.config.rules.check import validate_for_world
from nanotrain.errors import NanotrainError
from nanotrain.plan.plan import plan_run
from nanotrain.runs.relayout import request_layout
from nanotrain.topology.topology import Topology
from nanotrain.train.inputs import open_inputs
from nanotrain.train.phases import train_in_phases
from tests.harness import parallel_config
from tests.laws.command_line import arguments

BORDER, STEPS = 2, 4
SIZES = """--num-layers 4 --hidden-size 32 --num-attention-heads 4 --num-query-groups 4
    --make-vocab-size-divisible-by 8 --lr 3e-3 --min-lr 1e-3 --num-workers 0"""
SCHEDULE = f"--train-iters {STEPS} --save-interval {STEPS} --log-interval {BORDER}"


DENSE = "--swiglu"
EXPERTS = """--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 48
    --moe-router-score-function sigmoid --moe-router-enable-expert-bias"""
HYBRID = """--hybrid-layer-pattern M*M- --mamba-state-dim 8 --mamba-head-dim 8
    --mamba-num-heads 8 --mamba-num-groups 4"""
MODELS = (DENSE, EXPERTS, HYBRID)
STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")


@dataclass(frozen=True)
class Layout:
    """Flags of a layout, and its number of ranks."""

    flags: str
    ranks: int


def line(folder: Path, model: str, layout: Layout) -> list[str]:
    """The command line of a run."""
    return arguments(folder, SIZES, SCHEDULE, model, layout.flags)


@cache
def _draws() -> tuple[list[tuple[str, Layout, Layout]], Iterator[tuple[str, Layout, Layout]]]:
    return [], _random_pairs()


def random_pair(number: int) -> tuple[str, Layout, Layout]:
    """The pair with this number; always the same."""
    found, more = _draws()
    while len(found) <= number:
        found.append(next(more))
    return found[number]


def _random_pairs() -> Iterator[tuple[str, Layout, Layout]]:
    """Models with two layouts each, the second on as many ranks or fewer."""
    draw = random.Random(48)
    while True:
        model = draw.choice(MODELS)
        ranks = draw.randint(2, 8)
        before = _random_layout(draw, model, ranks)
        smaller = draw.random() < 0.25
        after = _random_layout(draw, model, draw.randint(1, ranks) if smaller else ranks)
        if before != after and fits(model, before) and fits(model, after):
            yield model, before, after


def _random_layout(draw: random.Random, model: str, ranks: int) -> Layout:
    """A layout that may not fit."""
    sizes = {
        "tensor-model-parallel-size": draw.choice((1, 2, 4)),
        "pipeline-model-parallel-size": draw.choice((1, 1, 2)),
        "context-parallel-size": draw.choice((1, 1, 2)),
        "num-distributed-optimizer-instances": draw.choice((1, 1, 2)),
        "micro-batch-size": draw.choice((1, 2)),
    }
    if model == EXPERTS:
        sizes["expert-model-parallel-size"] = draw.choice((1, 2, 4))
    words = [f"--{name} {size}" for name, size in sizes.items()]
    words.append(f"--data-parallel-sharding-strategy {draw.choice(STRATEGIES)}")
    return Layout(" ".join(words), ranks)


def fits(model: str, layout: Layout) -> bool:
    """Whether a run accepts a layout."""
    flags = f"{SIZES} {SCHEDULE} {model} {layout.flags} --mock-data --vocab-size 100"
    try:
        config = load(["+config=tiny", *flags.split(), "--global-batch-size", "12"]).config
        validate_for_world(config, layout.ranks)
        plan_run(config, layout.ranks, rank=0)
    except NanotrainError:
        return False
    return True


def train(ctx: ParallelContext, words: list[str], *, num_ranks: int) -> ParallelContext:
    """Train on the first ranks of a world, as `main` does; returns the context, as it is then."""
    if ctx.topology.world_size != num_ranks:
        ctx.rejoin(Topology.of(parallel_config(), num_ranks))
    loaded = load(words)
    validate_for_world(loaded.config, num_ranks)
    config, inputs = open_inputs(loaded)
    plan = plan_run(config, num_ranks, rank=ctx.rank)
    context = ParallelContext.attach(plan.topology)
    train_in_phases(plan, inputs, context=context)
    return context


def _return_to(ctx: ParallelContext, context: ParallelContext) -> None:
    """Let the context of the harness go on with the ranks that a run has left."""
    if not context.is_member:
        ctx.control = Group.single_rank("control", ctx.rank)
        return
    ctx.topology = context.topology
    ctx.rejoin(Topology.of(parallel_config(), context.topology.world_size))


def changed(ctx: ParallelContext, folder: Path, model: str, before: Layout, after: Layout) -> None:
    """Train with a request in the run folder, which is taken at step BORDER."""
    if ctx.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        request_layout(folder, after.flags.split(), ranks=after.ranks)
    context = train(ctx, line(folder, model, before), num_ranks=before.ranks)
    _return_to(ctx, context)


def resumed(ctx: ParallelContext, folder: Path, model: str, before: Layout, after: Layout) -> None:
    """Stop with a checkpoint at step BORDER, and go on from it in the other layout."""
    stop = f"--exit-interval {BORDER}"
    train(ctx, [*line(folder, model, before), *stop.split()], num_ranks=before.ranks)
    if after.ranks < before.ranks:
        ctx.rejoin(Topology.of(parallel_config(), after.ranks))
    if ctx.is_member:
        train(ctx, line(folder, model, after), num_ranks=after.ranks)
    else:
        ctx.control = Group.single_rank("control", ctx.rank)
