"""`ParityReport` of `nanotrain parity` as text and as JSON.

StepDifference     loss and gradient norm of one step
TensorDifference   one gradient, weight or buffer
ParityReport       all of them, complaints and the verdict
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import inf, isfinite
from typing import Any

from nanotrain.config.config import Config
from nanotrain.config.model import ModelConfig
from nanotrain.config.parallel import ParallelConfig
from nanotrain.config.references import as_written
from nanotrain.config.schema import flat_values, to_dict
from nanotrain.quantities import count_of, table_lines

# Tolerances of gradients and weights, as multiples of the tolerance of losses. An element of a
# gradient is one sum with cancellation, a loss the mean of many: measured 7e-6 of a gradient, 1e-7
# of a loss.
# Adam divides a gradient by its own size, so rounding errors of small gradients move weights:
# measured 1e-4 to 2e-2 of the learning rate.
GRADIENT_FACTOR = 10
WEIGHT_FACTOR = 5000
SIZES = ("num_layers", "hidden_size", "num_attention_heads")


@dataclass(frozen=True)
class StepDifference:
    """Loss and gradient norm of one step, of the layout and of one rank."""

    step: int
    loss: float
    loss_on_one_rank: float
    grad_norm: float
    grad_norm_on_one_rank: float

    @property
    def loss_difference(self) -> float:
        """Relative difference of the losses."""
        return relative(self.loss, self.loss_on_one_rank)

    @property
    def grad_norm_difference(self) -> float:
        """Relative difference of the gradient norms."""
        return relative(self.grad_norm, self.grad_norm_on_one_rank)


@dataclass(frozen=True)
class TensorDifference:
    """Difference of one tensor between the layout and one rank."""

    name: str  # global name
    shape: tuple[int, ...]  # global shape
    sharding: str  # how the layout shards it
    # largest absolute difference of an element; infinite if some element is on no rank
    absolute: float
    relative: float  # `absolute` relative to the scale of the tensor


@dataclass(frozen=True)
class ParityReport:
    """Comparison of a layout with one rank."""

    config: Config  # the shrunk configuration
    world_size: int  # ranks of the layout
    # largest relative difference of losses and gradient norms that counts as equal;
    # `GRADIENT_FACTOR` times that for gradients, `WEIGHT_FACTOR` times that for weights and buffers
    tolerance: float
    steps: tuple[StepDifference, ...]  # in order
    # gradients of the first step, relative to their largest element; largest difference first
    parameters: tuple[TensorDifference, ...]
    # after the last step, relative to the learning rate; largest difference first
    weights: tuple[TensorDifference, ...]
    # after the last step, relative to their largest element; largest difference first
    buffers: tuple[TensorDifference, ...]
    # weights and buffers whose replicas differ between ranks after the last step
    unequal_replicas: tuple[str, ...]
    samples_read_once: bool  # whether every sample of every global batch was read exactly once
    left_out: tuple[str, ...] = ()  # settings that have no part in the comparison, with the reasons

    @property
    def wrong_gradients(self) -> tuple[TensorDifference, ...]:
        """Gradients out of tolerance, largest difference first."""
        return _out_of_tolerance(self.parameters, GRADIENT_FACTOR * self.tolerance)

    @property
    def wrong_state(self) -> tuple[TensorDifference, ...]:
        """Weights and buffers out of tolerance, largest difference first."""
        state = (*self.weights, *self.buffers)
        wrong = _out_of_tolerance(state, WEIGHT_FACTOR * self.tolerance)
        return tuple(sorted(wrong, key=lambda row: -row.relative))

    @property
    def needed_tolerance(self) -> float:
        """The least tolerance with which the layout would count as equal to one rank."""
        steps = [max(step.loss_difference, step.grad_norm_difference) for step in self.steps]
        gradients = [row.relative / GRADIENT_FACTOR for row in self.parameters]
        state = [row.relative / WEIGHT_FACTOR for row in (*self.weights, *self.buffers)]
        return max(*steps, *gradients, *state)

    @property
    def complaints(self) -> tuple[str, ...]:
        """One text per difference between the layout and one rank; empty if they train equally."""
        largest = {
            "losses": max(step.loss_difference for step in self.steps),
            "gradient norms": max(step.grad_norm_difference for step in self.steps),
        }
        complaints = []
        for name, value in largest.items():
            if not value <= self.tolerance:
                complaints.append(f"{name} differ by {value:.1e}")
        gradients = self.wrong_gradients
        if gradients:
            number = f"{len(gradients)} of {len(self.parameters)}"
            complaints.append(f"{number} gradients differ, {gradients[0].name} most")
        state = self.wrong_state
        if state:
            number = f"{len(state)} of {len(self.weights) + len(self.buffers)}"
            complaints.append(f"{number} weights and buffers differ, {state[0].name} most")
        complaints += exact_complaints(self.unequal_replicas, self.samples_read_once)
        return tuple(complaints)

    @property
    def holds(self) -> bool:
        """Whether the layout trains like one rank."""
        return not self.complaints

    @property
    def verdict(self) -> str:
        """The result as one line."""
        within = f"within {self.tolerance:g}"
        if self.holds:
            ranks = count_of(self.world_size, "rank", verb="trains")
            return f"equal: {ranks} as one does, {within}"
        ranks = count_of(self.world_size, "rank", verb="does")
        complaints = "; ".join(self.complaints)
        return f"NOT EQUAL: {ranks} not train as one does, {within}: {complaints}"

    def text(self) -> str:
        """Tables for the console."""
        state = sorted((*self.weights, *self.buffers), key=lambda row: -row.relative)
        gradients = _tensor_table(
            "gradient of the first step", self.parameters, wrong=self.wrong_gradients
        )
        weights = _tensor_table(
            "weights and buffers after the last step", state, wrong=self.wrong_state
        )
        lines = [
            *config_lines(self.config, world_size=self.world_size, left_out=self.left_out),
            "",
            *_step_table(self.steps),
            "",
            *gradients,
            "",
            *weights,
            "",
            *exact_lines(self.unequal_replicas, self.samples_read_once),
            self.verdict,
        ]
        return "\n".join(lines)

    def to_json(self) -> str:
        """All numbers; numbers that are not finite become null."""
        values = {"equal": self.holds, "complaints": self.complaints, **vars(self)}
        for name in ("steps", "parameters", "weights", "buffers"):
            values[name] = [_json_row(row) for row in getattr(self, name)]
        values["config"] = to_dict(values.pop("config"))
        return json.dumps(values, indent=2, allow_nan=False)


def config_lines(config: Config, *, world_size: int, left_out: Sequence[str]) -> list[str]:
    """Layout, model and batch of a shrunk configuration, and settings that are left out."""
    train = config.train
    parallel = _changed_fields(config.parallel, ParallelConfig())
    samples = f"{train.global_batch_size} samples of {config.data.seq_length} tokens"
    schedules = _describe_schedules(config)
    return [
        f"layout   world_size {world_size}, {parallel}",
        f"model    {_changed_fields(config.model, ModelConfig())}",
        f"batch    {samples}, by {train.micro_batch_size}{schedules}",
        *(f"left out {line}" for line in left_out),
    ]


def exact_complaints(unequal_replicas: Sequence[str], samples_read_once: bool) -> list[str]:
    """One text per comparison without a tolerance that fails."""
    complaints = []
    if unequal_replicas:
        complaints.append(f"replicas of {', '.join(unequal_replicas[:3])} are not equal")
    if not samples_read_once:
        complaints.append("samples were left out or read twice")
    return complaints


def exact_lines(unequal_replicas: Sequence[str], samples_read_once: bool) -> list[str]:
    """The comparisons without a tolerance, for the console."""
    replicas = "yes"
    if unequal_replicas:
        replicas = "no: " + ", ".join(unequal_replicas)
    reads = "yes" if samples_read_once else "no"
    return [f"replicas bit-equal  {replicas}", f"samples read once   {reads}"]


def relative(value: float, reference: float) -> float:
    """Relative difference of a number from its reference; infinite if either is not finite.

    >>> relative(1.5, 1.0), relative(0.0, 0.0), relative(float("nan"), 1.0)
    (0.5, 0.0, inf)
    """
    if not isfinite(value) or not isfinite(reference):
        return inf
    if value == reference:
        return 0.0
    return abs(value - reference) / abs(reference) if reference else inf


def _out_of_tolerance(
    rows: Sequence[TensorDifference], tolerance: float
) -> tuple[TensorDifference, ...]:
    """Tensors whose relative difference is larger than a tolerance, or not a number."""
    return tuple(row for row in rows if not row.relative <= tolerance)


def _describe_schedules(config: Config) -> str:
    """Schedules that change the batch after the first step, as the end of a line."""
    train = config.train
    changed = []
    if train.rampup_batch_size or train.step_batch_size_schedule:
        changed.append("batch size")
    if train.step_seq_length_schedule:
        changed.append("sequence length")
    return f"; {' and '.join(changed)} smaller in the first step" if changed else ""


def _changed_fields(section: object, default: object) -> str:
    """The fields of a section that are not at their defaults, and the sizes of the model."""
    defaults = flat_values(default)
    shown = []
    for key, value in flat_values(section).items():
        if key in SIZES or value != defaults[key]:
            shown.append(f"{key} {as_written(value)}")
    return ", ".join(shown)


def _json_row(row: StepDifference | TensorDifference) -> dict[str, Any]:
    """The fields of a row; numbers that are not finite become None."""
    values = asdict(row)
    if isinstance(row, StepDifference):
        values["loss_difference"] = row.loss_difference
        values["grad_norm_difference"] = row.grad_norm_difference
    for name, value in values.items():
        if isinstance(value, float) and not isfinite(value):
            values[name] = None
    return values


def _step_table(steps: Sequence[StepDifference]) -> list[str]:
    """Losses and gradient norms, step by step."""
    rows = [["step", "loss", "one rank", "differs", "grad norm", "one rank", "differs"]]
    for step in steps:
        row = [
            str(step.step),
            f"{step.loss:.7f}",
            f"{step.loss_on_one_rank:.7f}",
            f"{step.loss_difference:.1e}",
            f"{step.grad_norm:.7f}",
            f"{step.grad_norm_on_one_rank:.7f}",
            f"{step.grad_norm_difference:.1e}",
        ]
        rows.append(row)
    return table_lines(rows, right=range(7))


def _tensor_table(
    title: str, tensors: Sequence[TensorDifference], *, wrong: Sequence[TensorDifference]
) -> list[str]:
    """Differences of tensors; the wrong ones are marked."""
    rows = [[title, "shape", "sharding", "max abs", "relative", ""]]
    for row in tensors:
        shape = "x".join(str(size) for size in row.shape)
        mark = "<-" if row in wrong else ""
        numbers = [f"{row.absolute:.1e}", f"{row.relative:.1e}"]
        rows.append([row.name, shape, row.sharding, *numbers, mark])
    return table_lines(rows, right=(3, 4))
