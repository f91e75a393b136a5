"""`nanotrain parity --keep-precision`: a layout judged beside roundings, in 16 and 8 bits.

    one rank, once as it is and several times perturbed -> Noise of every number and tensor
    the layout on N ranks                               -> its differences from one rank
    differences in units of the noise                   -> PerturbedReport

What is compared is as in check.py, but weights are the main params, as a rounded weight hides what
was added to it. A layout is wrong where it differs by more than `LIMIT` times the noise. A token
whose experts are near a tie goes to others in some runs only. Where a layout is over the limit,
one rank is therefore perturbed more often before it is called wrong.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.config.config import Config, PrecisionConfig
from nanotrain.config.load import Loaded
from nanotrain.parity.check import (
    Record,
    Tensors,
    are_read_once,
    global_tensors,
    largest_differences,
    record_steps,
    shrink_checked,
    unequal_replicas,
)
from nanotrain.parity.local_ranks import run_local_ranks
from nanotrain.parity.perturbation import Deviation, Noise, Perturbation, size_of
from nanotrain.parity.perturbed_report import PerturbedReport, Row
from nanotrain.parity.shrink import left_out, on_one_rank
from nanotrain.topology.topology import Topology
from nanotrain.train.inputs import with_known_model

FEW_RUNS = 8  # perturbed runs at first
MORE_RUNS = 24  # and before a layout is called wrong
# A tensor much smaller than the others consists of roundings: its deviation is relative to this
# part of the median norm at least.
LEAST_NORM = 1e-3
Deviations = dict[str, Deviation]


def check_by_perturbation(loaded: Loaded, world_size: int, *, num_steps: int) -> PerturbedReport:
    """Train a shrunk form of a configuration in its own precision, and judge it by perturbation.

    Args:
        loaded: validated configuration.
        world_size: number of ranks, N, which are processes on this machine.
        num_steps: number of optimizer steps.

    Raises:
        TopologyError: the layout does not fit the ranks.
        ConfigError: the model cannot be sharded by the layout.
    """
    small, topology = shrink_checked(loaded, world_size, num_steps=num_steps, keeps_precision=True)
    single = on_one_rank(small)
    one_rank = Topology.of(single.parallel, 1)

    def perturb(first: int, count: int) -> list[Record]:
        runs = PerturbedRuns(single, range(first, first + count))
        (records,) = run_local_ranks(one_rank, record_perturbed, arguments=[runs])
        return list(records)

    reference, *perturbed = perturb(0, 1 + FEW_RUNS)
    records = run_local_ranks(topology, record_steps, arguments=[small])
    report = judge(reference, records, perturbed=perturbed, config=small)
    if report.is_over_limit:
        perturbed += perturb(1 + FEW_RUNS, MORE_RUNS)
        report = judge(reference, records, perturbed=perturbed, config=small)
    config = with_known_model(loaded.config, loaded.explicit)
    return report.leaving_out(left_out(replace(config, precision=PrecisionConfig())))


@dataclass(frozen=True)
class PerturbedRuns:
    """Runs of one rank."""

    config: Config  # the shrunk configuration for one rank
    seeds: range  # of the perturbations; 0 is without one


def record_perturbed(context: ParallelContext, runs: PerturbedRuns) -> list[Record]:
    """Train a shrunk configuration on one rank once per seed."""
    size = size_of(runs.config.precision)
    records = []
    for seed in runs.seeds:
        perturbation = Perturbation(size, seed) if seed else None
        records.append(record_steps(context, runs.config, perturbation=perturbation))
    return records


def judge(
    reference: Record,
    records: Sequence[Record],
    *,
    perturbed: Sequence[Record],
    config: Config,
) -> PerturbedReport:
    """Compare the records of a layout with one rank, in units of what perturbed runs change.

    Args:
        reference: record of one rank.
        records: records of the layout, by rank.
        perturbed: records of one rank with perturbed inputs.
        config: the shrunk configuration.
    """
    comparison = _Comparison(reference, perturbed, records)
    return PerturbedReport(
        config=config,
        world_size=len(records),
        size=size_of(config.precision),
        num_runs=len(perturbed),
        steps=comparison.steps(),
        gradients=comparison.tensors("grads"),
        weights=comparison.tensors("main_weights"),
        buffers=comparison.tensors("buffers"),
        unequal_replicas=unequal_replicas(records),
        samples_read_once=are_read_once(records, config),
    )


@dataclass(frozen=True)
class _Comparison:
    """Records of one rank, of one rank perturbed, and of a layout."""

    reference: Record
    perturbed: Sequence[Record]
    records: Sequence[Record]

    def steps(self) -> tuple[Row, ...]:
        """Losses and gradient norms, step by step."""
        rows = []
        for index in range(len(self.reference.losses)):
            for name in ("losses", "grad_norms"):
                rows.append(self._number(name, index))
        return tuple(rows)

    def _number(self, name: str, index: int) -> Row:
        """The loss or the gradient norm of a step."""
        expected = getattr(self.reference, name)[index]
        runs = [_number_deviation(getattr(run, name)[index], expected) for run in self.perturbed]
        values = [getattr(record, name)[index] for record in self.records]
        deviation = max(
            (_number_deviation(value, expected) for value in values), key=lambda d: d.norm
        )
        label = {"losses": "loss", "grad_norms": "gradient norm"}[name]
        return Row.of(f"step {index + 1} {label}", deviation, noise=Noise.of(runs))

    def tensors(self, name: str) -> tuple[Row, ...]:
        """Gradients, main params or buffers; the largest factor first."""
        reference: Tensors = getattr(self.reference, name)
        if not reference:
            return ()
        shards: dict[str, str] = {}
        for record in self.records:
            shards |= record.shards
        runs = [_deviations(reference, [getattr(run, name)]) for run in self.perturbed]
        rows = []
        local = [getattr(record, name) for record in self.records]
        for tensor, deviation in _deviations(reference, local).items():
            noise = Noise.of([run[tensor] for run in runs])
            rows.append(Row.of(tensor, deviation, noise=noise, sharding=shards.get(tensor, "-")))
        return tuple(sorted(rows, key=lambda row: (-row.factor, row.name)))


def _number_deviation(value: float, expected: float) -> Deviation:
    """The deviation of one number."""
    return Deviation.between(torch.tensor([value - expected]), torch.tensor([expected]))


def _deviations(reference: Tensors, local: Sequence[Tensors]) -> Deviations:
    """The deviation of every tensor from the same tensor of one rank, by name."""
    expected = global_tensors(reference)
    norms = sorted(tensor.norm().item() for tensor in expected.values())
    least = LEAST_NORM * norms[len(norms) // 2]
    differences = largest_differences(reference, local)
    return {
        name: Deviation.between(difference, expected[name], least=least)
        for name, difference in differences.items()
    }
