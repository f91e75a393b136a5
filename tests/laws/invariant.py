"""What `--invariant` promises: runs of any layout whose every bit is compared with one rank.

`run_here(ctx, case)` trains on this rank; `bits_of` joins the ranks. A `Bits` has the bytes of the
loss and the gradient norm of every step, and of all weights and optimizer state at the end.
`assert_same_bits` compares layouts of a case with one rank.
"""

from dataclasses import dataclass
from typing import Any

import torch

from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.spec.boxes import TensorBox
from nanotrain.topology.topology import Topology
from nanotrain.train.run import Run
from nanotrain.train.step import StepOutput
from tests.harness import run_ranks
from tests.laws.worlds import GLOBAL_BATCH, Case, build_here, config_of, train_steps

STEPS = 3


@dataclass(frozen=True)
class RankResult:
    """What one rank saw and holds."""

    losses: list[float]
    grad_norms: list[float]
    state: dict[TensorBox, torch.Tensor]


@dataclass(frozen=True)
class Bits:
    """What a run leaves: numbers of every step, and full tensors by name."""

    losses: list[float]
    grad_norms: list[float]
    state: dict[str, torch.Tensor]


def invariant(steps: int = STEPS, **sections: dict[str, Any]) -> Case:
    """A case of the small model with `--invariant`."""
    case = Case(steps).but(
        precision={"invariant": True}, parallel={"gradient_accumulation_fusion": None}
    )
    return case.but(**sections)


def run_here(ctx: ParallelContext, case: Case) -> RankResult:
    """Train a case on this rank."""
    run = build_here(ctx, case)
    return result_of(run, train_steps(run, case.steps))


def result_of(run: Run, results: list[StepOutput]) -> RankResult:
    """What this rank holds after these steps."""
    state = {box: tensor.clone() for box, tensor in run.optimizer.state_tensors().items()}
    return RankResult(
        [result.loss for result in results], [result.grad_norm for result in results], state
    )


def run_layouts(ctx: ParallelContext, cases: list[Case]) -> list[RankResult]:
    """Cases of several layouts one after the other on the ranks of one world."""
    results = []
    for case in cases:
        topology = Topology.of(config_of(case).parallel, ctx.topology.world_size)
        results.append(run_here(ParallelContext.attach(topology), case))
    return results


def bits_of(results: list[RankResult]) -> Bits:
    """Join the ranks; what several of them hold must be the same."""
    first = results[0]
    full: dict[str, torch.Tensor] = {}
    for result in results:
        assert result.losses == first.losses and result.grad_norms == first.grad_norms
        for box, tensor in result.state.items():
            total = full.setdefault(box.name, torch.full(box.shape, torch.nan))
            held = total[box.box.slices()]
            is_same = (held == tensor) | held.isnan()
            assert bool(is_same.all()), f"replicas of {box.name} differ"
            total[box.box.slices()] = tensor.to(total.dtype)
    return Bits(first.losses, first.grad_norms, full)


def first_difference(bits: Bits, reference: Bits) -> str:
    """The first number or tensor that differs, in words; empty if every bit is the same."""
    for name in ("losses", "grad_norms"):
        pairs = zip(getattr(bits, name), getattr(reference, name), strict=True)
        for step, (mine, other) in enumerate(pairs, start=1):
            if mine != other:
                return f"{name} of step {step}: {mine!r} beside {other!r}"
    assert bits.state.keys() == reference.state.keys()
    for name, tensor in reference.state.items():
        differs = bits.state[name] != tensor
        if bool(differs.any()):
            return f"{name}: {int(differs.sum())} of {tensor.numel()} elements"
    return ""


def one_rank(case: Case) -> Bits:
    """The bits of one rank with one microbatch."""
    single = case.but(train={"micro_batch_size": GLOBAL_BATCH})
    return bits_of(run_ranks(1, run_here, single, shares=True))


def assert_same_bits(layouts: list[Any], case: Case) -> None:
    """Every layout, a number of ranks and sections, leaves the bits of one rank.

    One world per number of ranks.
    """
    reference = one_rank(case)
    for num_ranks in sorted({num_ranks for num_ranks, _ in layouts}):
        chosen = [sections for number, sections in layouts if number == num_ranks]
        cases = [case.but(**sections) for sections in chosen]
        by_rank = run_ranks(num_ranks, run_layouts, cases, shares=True)
        for number, sections in enumerate(chosen):
            bits = bits_of([results[number] for results in by_rank])
            difference = first_difference(bits, reference)
            assert not difference, f"{num_ranks} ranks, {sections}: {difference}"
