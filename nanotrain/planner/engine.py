"""Training programs whose steps the planner predicts: rows of data/engines.yaml.

engines()       every engine by its name
engine_of(name) one of them, or an error with the nearest name
with_sections   an engine with some of its constants replaced
engine_on_cpu   an engine as it runs on a processor
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from nanotrain.config.suggest import nearest_choice
from nanotrain.errors import ConfigError
from nanotrain.planner.hardware import Link, read_data


@dataclass(frozen=True)
class Launches:
    """Host time to launch work on the device."""

    operator_s: float
    collective_s: float


@dataclass(frozen=True)
class Operators:
    """Operators of a layer and of the loss."""

    fused: bool  # activations, rotary positions and additions are one operator each
    accumulation: str  # weight gradients in fp32: fused, separate or sharded
    loss_forward_bytes: float  # read and written per logit
    loss_backward_bytes: float  # read and written per logit
    attention_factor: float  # time of attention relative to the best kernels
    time_factor: float  # time of all operators relative to the best known


@dataclass(frozen=True)
class Overlap:
    """Communication that runs while operators compute."""

    tp: str  # collectives of tensor parallelism that overlap: none, wgrad or tiles
    contention: float  # seconds by which a hidden second of a collective slows the operators
    grads: bool | None  # reductions overlap with the last backward; None: as configured
    params: bool | None  # gathers overlap with the first forward; None: as configured
    shared_expert: bool  # it is computed while tokens travel to the other experts


@dataclass(frozen=True)
class SlowTransfer:
    """Transfers between nodes that take a fixed time, on many nodes or with little memory left."""

    min_nodes: float
    min_memory_share: float  # share of the GPU's memory that is in use
    seconds: float


@dataclass(frozen=True)
class Pipeline:
    """Stages of a pipeline and the transfers between its ranks."""

    # layers of the stages: configured; balanced, by weights where the layers do not divide evenly;
    # or shares, by the weights of products, the head included
    stages: str
    overlaps_p2p: bool  # transfers overlap with computation; with interleaved stages always
    slow_transfer: SlowTransfer | None
    schedules: Sequence[str] | None  # pipeline schedules that it has; None: all of nanotrain's


@dataclass(frozen=True)
class Optimizer:
    """Update of the parameters, gradient buckets and gathers of updated parameters."""

    update_bytes: float  # read and written per parameter
    bucket_numel: int | None  # parameters of a gradient bucket; None: as configured
    gather_factor: float  # time of gathers relative to an all-gather
    gather_copy_s: float  # host time per parameter tensor and rank to copy gathered parameters


@dataclass(frozen=True)
class Memory:
    """Bytes that the engine needs."""

    keeps_low_precision_grads: bool  # gradients exist in the dtype of the parameters and in fp32
    saved_factor: float  # bytes that a block saves, relative to Megatron-LM


@dataclass(frozen=True)
class SlowStep:
    """Time that a step without a pipeline loses on many nodes."""

    min_nodes: float
    seconds: float


@dataclass(frozen=True)
class Network:
    """Links between nodes, and stalls of collectives."""

    link: Link | None  # per GPU between nodes; None: the link of the GPU's row
    host_stall_s: float  # per collective and tp rank, if other nodes hold other pipeline ranks
    device_stall_s: float  # per collective and tp rank, if tp spans several nodes
    slow_step: SlowStep | None


@dataclass(frozen=True)
class Engine:
    """A training program."""

    name: str  # nanotrain, megatron, fsdp2 or nanotron
    launches: Launches
    operators: Operators
    overlap: Overlap
    pipeline: Pipeline
    optimizer: Optimizer
    memory: Memory
    network: Network


Sections = Mapping[str, Mapping[str, Any]]  # values by the section of an engine and its field


@cache
def engines() -> dict[str, Engine]:
    """The engines by name."""
    table = read_data("engines")
    engine_by_name = {}
    for name, sections in table["engines"].items():
        default = _build_engine(name, table["defaults"])
        engine_by_name[name] = with_sections(default, sections)
    return engine_by_name


def _build_engine(name: str, sections: Sections) -> Engine:
    """An engine whose every field is given."""
    return Engine(
        name=name,
        launches=Launches(**sections["launches"]),
        operators=Operators(**sections["operators"]),
        overlap=Overlap(**sections["overlap"]),
        pipeline=Pipeline(**sections["pipeline"]),
        optimizer=Optimizer(**sections["optimizer"]),
        memory=Memory(**sections["memory"]),
        network=Network(**sections["network"]),
    )


def with_sections(engine: Engine, sections: Sections) -> Engine:
    """An engine with other values of some fields.

    Args:
        engine: the engine that has the other fields.
        sections: values by section and field, as in data/engines.yaml.
    """
    changed = {}
    for section, values in sections.items():
        fields = {field: _field_value(field, value) for field, value in values.items()}
        changed[section] = replace(getattr(engine, section), **fields)
    return replace(engine, **changed)


def _field_value(field: str, value: Any) -> Any:
    """The value of a field from the data file, where nested classes are mappings."""
    if not isinstance(value, Mapping):
        return value
    classes = {"link": Link, "slow_transfer": SlowTransfer, "slow_step": SlowStep}
    return classes[field](**value)


def engine_of(name: str) -> Engine:
    """The engine of a name.

    Raises:
        ConfigError: an unknown name.
    """
    if name not in engines():
        near = nearest_choice(name, engines()) or "nanotrain"
        known = ", ".join(engines())
        raise ConfigError(
            f"unknown engine {name}", why=f"the engines are {known}", fix=f"set --engine {near}"
        )
    return engines()[name]


def engine_on_cpu(engine: Engine) -> Engine:
    """The engine on a processor, which computes what it launches."""
    return with_sections(engine, read_data("engines")["on_cpu"])
