"""What `nanotrain parity` found, as tables and as JSON: `ParityReport` of `StepDifference` and `ParamDifference`."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import inf, isfinite
from typing import Any

from nanotrain.config.config import Config, ModelConfig, ParallelConfig
from nanotrain.config.schema import flat_values, plain, to_dict

# An element of a gradient is one sum with cancellation, a loss the mean of many: seen are 1e-7 of a loss, 7e-6 here.
GRADIENT_FACTOR = 10
SIZES = ("num_layers", "hidden_size", "num_attention_heads")


@dataclass(frozen=True)
class StepDifference:
    """One step: the layout's numbers and one rank's."""

    step: int
    loss: float
    loss_on_one_rank: float
    grad_norm: float
    grad_norm_on_one_rank: float

    @property
    def loss_difference(self) -> float:
        """Relative."""
        return relative(self.loss, self.loss_on_one_rank)

    @property
    def grad_norm_difference(self) -> float:
        """Relative."""
        return relative(self.grad_norm, self.grad_norm_on_one_rank)


@dataclass(frozen=True)
class ParamDifference:
    """One parameter's gradient in the first step.

    Attributes:
        name: global name.
        shape: over all ranks.
        cut: how the layout cuts it.
        absolute: largest absolute difference of an element; infinite where no rank held some element.
        relative: the same over the largest element of the gradient.
    """

    name: str
    shape: tuple[int, ...]
    cut: str
    absolute: float
    relative: float


@dataclass(frozen=True)
class ParityReport:
    """A layout beside one rank.

    Attributes:
        config: what was trained, shrunk.
        world_size: ranks of the layout.
        tolerance: largest relative difference of losses and norms that counts as equal; ten times that of gradients.
        steps: in order.
        parameters: worst first.
        unequal_replicas: parameters whose copies differ between ranks after the last step.
        samples_read_once: whether every sample of every global batch was read, each once.
    """

    config: Config
    world_size: int
    tolerance: float
    steps: tuple[StepDifference, ...]
    parameters: tuple[ParamDifference, ...]
    unequal_replicas: tuple[str, ...]
    samples_read_once: bool

    @property
    def wrong(self) -> tuple[ParamDifference, ...]:
        """Parameters whose gradient differs, worst first."""
        return tuple(row for row in self.parameters if not row.relative <= GRADIENT_FACTOR * self.tolerance)

    @property
    def complaints(self) -> tuple[str, ...]:
        """What is not as on one rank; nothing if the layout trains alike."""
        steps, wrong = self.steps, self.wrong
        found = []
        for what, worst in (
            ("losses", max(step.loss_difference for step in steps)),
            ("gradient norms", max(step.grad_norm_difference for step in steps)),
        ):
            if not worst <= self.tolerance:
                found.append(f"{what} differ by {worst:.1e}")
        if wrong:
            found.append(f"{len(wrong)} of {len(self.parameters)} gradients differ, {wrong[0].name} the most")
        if self.unequal_replicas:
            found.append(f"replicas of {', '.join(self.unequal_replicas[:3])} are not equal")
        if not self.samples_read_once:
            found.append("samples were left out or read twice")
        return tuple(found)

    @property
    def holds(self) -> bool:
        """Whether the layout trains as one rank does."""
        return not self.complaints

    @property
    def verdict(self) -> str:
        """One line."""
        ranks = f"{self.world_size} ranks" if self.world_size > 1 else "1 rank"
        if self.holds:
            return f"equal: {ranks} train as one does, within {self.tolerance:g}"
        return f"NOT EQUAL: {ranks} do not train as one does, within {self.tolerance:g}: {'; '.join(self.complaints)}"

    def text(self) -> str:
        """Tables for people."""
        train, data = self.config.train, self.config.data
        steps = [("step", "loss", "one rank", "differs", "grad norm", "one rank", "differs")]
        for step in self.steps:
            losses = (f"{step.loss:.7f}", f"{step.loss_on_one_rank:.7f}", f"{step.loss_difference:.1e}")
            norms = (f"{step.grad_norm:.7f}", f"{step.grad_norm_on_one_rank:.7f}", f"{step.grad_norm_difference:.1e}")
            steps.append((str(step.step), *losses, *norms))
        rows = [("gradient of the first step", "shape", "cut", "max abs", "relative", "")]
        for row in self.parameters:
            mark = "<-" if row in self.wrong else ""
            shape = "x".join(map(str, row.shape))
            rows.append((row.name, shape, row.cut, f"{row.absolute:.1e}", f"{row.relative:.1e}", mark))
        replicas = "no: " + ", ".join(self.unequal_replicas) if self.unequal_replicas else "yes"
        return "\n".join(
            [
                f"layout   world_size {self.world_size}, {_changed_fields(self.config.parallel, ParallelConfig())}",
                f"model    {_changed_fields(self.config.model, ModelConfig())}",
                f"batch    {train.global_batch_size} samples of {data.seq_length} tokens, by {train.micro_batch_size}",
                *("", *_table(steps, right=range(7)), "", *_table(rows, right=(3, 4)), ""),
                f"replicas bit-equal  {replicas}",
                f"samples read once   {'yes' if self.samples_read_once else 'no'}",
                self.verdict,
            ]
        )

    def to_json(self) -> str:
        """Everything, for programs; numbers that are not finite become null."""
        steps = [
            asdict(step) | {"loss_difference": step.loss_difference, "grad_norm_difference": step.grad_norm_difference}
            for step in self.steps
        ]
        found = {
            "equal": self.holds,
            "complaints": self.complaints,
            "world_size": self.world_size,
            "tolerance": self.tolerance,
            "steps": [_finite(step) for step in steps],
            "parameters": [_finite(asdict(row)) for row in self.parameters],
            "unequal_replicas": self.unequal_replicas,
            "samples_read_once": self.samples_read_once,
            "config": to_dict(self.config),
        }
        return json.dumps(found, indent=2, allow_nan=False)


def relative(value: float, reference: float) -> float:
    """How far a number is off, relative to what it should be; infinite where either is not finite.

    >>> relative(1.5, 1.0), relative(0.0, 0.0), relative(float("nan"), 1.0)
    (0.5, 0.0, inf)
    """
    if not isfinite(value) or not isfinite(reference):
        return inf
    if value == reference:
        return 0.0
    return abs(value - reference) / abs(reference) if reference else inf


def _changed_fields(section: object, default: object) -> str:
    """The fields of a section that are not at their defaults, and the sizes of the model."""
    values, defaults = flat_values(section), flat_values(default)
    shown = {key: value for key, value in values.items() if key in SIZES or value != defaults[key]}
    return ", ".join(f"{key} {plain(value)}" for key, value in shown.items())


def _finite(row: dict[str, Any]) -> dict[str, Any]:
    return {key: None if isinstance(value, float) and not isfinite(value) else value for key, value in row.items()}


def _table(rows: Sequence[tuple[str, ...]], *, right: Sequence[int]) -> list[str]:
    """Rows as lines of equally wide columns, those of numbers set to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if index in right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
