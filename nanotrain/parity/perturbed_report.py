"""`PerturbedReport` of `nanotrain parity --keep-precision` as text and as JSON.

Row               a number or a tensor: what the layout changes, and what roundings change
PerturbedReport   all of them, complaints and the verdict
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from math import isfinite, log2
from typing import Any

from nanotrain.config.config import Config
from nanotrain.config.schema import to_dict
from nanotrain.parity.perturbation import Deviation, Noise
from nanotrain.parity.report import config_lines, exact_complaints, exact_lines
from nanotrain.quantities import count_of, table_lines

# A layout that differs by more than this many times what perturbed runs do is wrong. Measured: up
# to 0.8 in layouts that are right, beside 32 runs; they round at fewer places than are perturbed.
LIMIT = 1.5


@dataclass(frozen=True)
class Row:
    """The deviation of a layout from one rank in one number or tensor."""

    name: str
    sharding: str  # how the layout shards it
    deviation: float  # 2-norm of the difference, relative
    along: float  # part of the difference along the tensor, relative
    noise: float  # the largest `deviation` of perturbed runs
    noise_along: float  # the largest `along` of perturbed runs
    factor: float  # the larger of the two ratios

    @classmethod
    def of(cls, name: str, deviation: Deviation, *, noise: Noise, sharding: str = "-") -> "Row":
        """The row of a number or a tensor."""
        return cls(
            name=name,
            sharding=sharding,
            deviation=deviation.norm,
            along=deviation.along,
            noise=noise.norm,
            noise_along=noise.along,
            factor=noise.factor(deviation),
        )

    @property
    def is_wrong(self) -> bool:
        """Whether the layout differs by more than roundings explain; true of NaN."""
        return not self.factor <= LIMIT


@dataclass(frozen=True)
class PerturbedReport:
    """Comparison of a layout with one rank, in units of what perturbed runs change."""

    config: Config  # the shrunk configuration
    world_size: int  # ranks of the layout
    size: float  # relative change of the inputs of layers in perturbed runs
    num_runs: int  # perturbed runs
    steps: tuple[Row, ...]  # loss and gradient norm, in order
    gradients: tuple[Row, ...]  # of the first step; largest factor first
    weights: tuple[Row, ...]  # main params after the last step; largest factor first
    buffers: tuple[Row, ...]  # after the last step; largest factor first
    # weights and buffers whose replicas differ between ranks after the last step
    unequal_replicas: tuple[str, ...]
    samples_read_once: bool  # whether every sample of every global batch was read exactly once
    left_out: tuple[str, ...] = ()  # settings that have no part in the comparison, with the reasons

    def leaving_out(self, settings: tuple[str, ...]) -> "PerturbedReport":
        """The report with the settings that have no part in the comparison."""
        return replace(self, left_out=settings)

    @property
    def rows(self) -> tuple[Row, ...]:
        """All numbers and tensors."""
        return (*self.steps, *self.gradients, *self.weights, *self.buffers)

    @property
    def is_over_limit(self) -> bool:
        """Whether a number or tensor is further from one rank than roundings explain."""
        return any(row.is_wrong for row in self.rows)

    @property
    def largest_factor(self) -> float:
        """The largest difference in units of what perturbed runs change."""
        return max(row.factor for row in self.rows)

    @property
    def complaints(self) -> tuple[str, ...]:
        """One text per kind of difference; empty if only roundings differ."""
        kinds = {
            "losses and norms": self.steps,
            "gradients": self.gradients,
            "weights": self.weights,
            "buffers": self.buffers,
        }
        complaints = []
        for kind, rows in kinds.items():
            wrong = [row for row in rows if row.is_wrong]
            if wrong:
                worst = max(wrong, key=lambda row: row.factor)
                number = f"{len(wrong)} of {len(rows)} {kind}"
                complaints.append(f"{number}, {worst.name} by {worst.factor:.3g} times")
        complaints += exact_complaints(self.unequal_replicas, self.samples_read_once)
        return tuple(complaints)

    @property
    def holds(self) -> bool:
        """Whether the layout trains like one rank."""
        return not self.complaints

    @property
    def verdict(self) -> str:
        """The result as one line."""
        if self.holds:
            ranks = count_of(self.world_size, "rank", verb="trains")
            factor = f"{self.largest_factor:.2g} times what last bits change"
            return f"equal: {ranks} as one does, up to {factor} (limit {LIMIT:g})"
        ranks = count_of(self.world_size, "rank", verb="does")
        complaints = "; ".join(self.complaints)
        return (
            f"NOT EQUAL: {ranks} not train as one does; "
            f"more than {LIMIT:g} times what last bits change: {complaints}"
        )

    def text(self) -> str:
        """Tables for the console."""
        runs = count_of(self.num_runs, "time")
        lines = [
            *config_lines(self.config, world_size=self.world_size, left_out=self.left_out),
            f"noise    one rank, {runs}, inputs of layers changed by 2^{log2(self.size):g}",
            "",
            *_table("loss and gradient norm", self.steps),
            "",
            *_table("gradient of the first step", self.gradients),
            "",
            *_table("weights and buffers after the last step", (*self.weights, *self.buffers)),
            "",
            *exact_lines(self.unequal_replicas, self.samples_read_once),
            self.verdict,
        ]
        return "\n".join(lines)

    def to_json(self) -> str:
        """All numbers; numbers that are not finite become null."""
        values = {
            "equal": self.holds,
            "complaints": self.complaints,
            "limit": LIMIT,
            "largest_factor": _finite_or_none(self.largest_factor),
            **vars(self),
        }
        for name in ("steps", "gradients", "weights", "buffers"):
            values[name] = [_json_row(row) for row in getattr(self, name)]
        values["config"] = to_dict(values.pop("config"))
        return json.dumps(values, indent=2, allow_nan=False)


def _finite_or_none(value: float) -> float | None:
    """A number as JSON has it."""
    return value if isfinite(value) else None


def _json_row(row: Row) -> dict[str, Any]:
    """The fields of a row; numbers that are not finite become None."""
    values = asdict(row)
    for name, value in values.items():
        if isinstance(value, float):
            values[name] = _finite_or_none(value)
    return values


def _table(title: str, rows: Sequence[Row]) -> list[str]:
    """A table of changes by a layout beside changes by last bits; wrong rows are marked."""
    lines = [[title, "sharding", "differs", "last bits", "along", "last bits", "factor", ""]]
    for row in rows:
        numbers = [row.deviation, row.noise, row.along, row.noise_along]
        cells = [f"{number:.1e}" for number in numbers]
        mark = "<-" if row.is_wrong else ""
        lines.append([row.name, row.sharding, *cells, f"{row.factor:.2f}", mark])
    return table_lines(lines, right=range(2, 7))
