"""The table of attention backends, and the choice of one for each layer of a model.

    BACKENDS           the rows of backends.yaml, in the order of preference: kernels and limits
    CardLimit          GPUs, cuDNN and torch with which something holds
    AttentionNeed      dtype, head dims and features of a layer
    AttentionDevice    the kind of device; pure data, so a choice needs no GPU
    backend_flags      the values of --attention-backend
    choose_backend     the first backend of a flag that can compute a need
    AttentionChoice    the backends of a model's layers

A new backend is a row of backends.yaml and of KERNELS.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from nanotrain.attention.call import AttentionKernel, TileKernel
from nanotrain.attention.chunk_kernels import flash_trains
from nanotrain.attention.flash_implementations import (
    IMPLEMENTATIONS,
    activate_implementation,
    installed_implementations,
)
from nanotrain.attention.flex import FlexKernel
from nanotrain.attention.sdpa import DenseKernel, LayerKernels, SdpaKernel
from nanotrain.attention.varlen import VarlenKernel
from nanotrain.comm.device import compute_capability, cudnn_version
from nanotrain.config.config import Config
from nanotrain.errors import ConfigError

FEATURES = ("documents", "window", "sinks", "softcap", "dropout", "all-gather cp", "ring cp")
EVERYTHING = frozenset(FEATURES)
AUTO = "auto"  # the value of --attention-backend that allows every automatic row
DTYPE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
FIRST_BF16 = (8, 0)  # the first CUDA compute capability whose kernels take bf16


@dataclass(frozen=True)
class Ability:
    """Dtypes and features of a backend on one kind of device."""

    dtypes: frozenset[str]
    features: frozenset[str]  # names in FEATURES


@dataclass(frozen=True)
class CardLimit:
    """GPUs with which something holds, and the first cuDNN and torch."""

    generations: tuple[int, ...]  # major CUDA compute capabilities
    cudnn: int = 0
    torch_version: tuple[int, int] = (2, 10)
    dims: tuple[int, int] = (0, 0)  # head dims of keys and values, where it is about heads

    def includes(self, device: "AttentionDevice") -> bool:
        """Whether a GPU is one of these."""
        if device.capability is None or device.capability[0] not in self.generations:
            return False
        return device.cudnn >= self.cudnn and device.torch_version >= self.torch_version


@dataclass(frozen=True)
class AttentionBackend:
    """One row of the table."""

    name: str
    flag: str  # the value of --attention-backend that selects it
    kernel: Callable[[bool], AttentionKernel]  # value in KERNELS
    abilities: Mapping[str, Ability]  # by kind of device
    min_head_dim: int = 1
    max_head_dim: int | None = None
    wide_heads: tuple[CardLimit, ...] = ()  # pairs of head dims above `max_head_dim`
    head_bytes: int = 1  # the bytes of a head are a multiple of this
    # whether GPUs with less shared memory lack the backward of some head dims (chunks.py)
    has_gap: bool = False
    # head dims of values: "any", "as wide as keys", or "no wider than keys"
    value_dims: str = "any"
    capability: tuple[int, int] = (0, 0)  # the first CUDA compute capability
    last_capability: tuple[int, int] | None = None
    first_cudnn: int = 0  # the first version of cuDNN
    implementation: str = ""  # of torch's flash operators: FA3, FA4, or torch's own
    torch_version: tuple[int, int] = (2, 10)  # the first one
    is_deterministic: bool = False  # its backward on a GPU; on a CPU all are
    # whether torch runs it with deterministic algorithms
    obeys_deterministic: bool = True
    is_in_graphs: bool = False  # whether a compiled block has it in its graph, on one cp rank
    is_automatic: bool = True  # whether --attention-backend auto may choose it
    automatic_on: CardLimit | None = None  # the GPUs on which it may; None: all

    def multiple(self, dtype: str) -> int:
        """The number of channels that head dims are a multiple of."""
        return max(1, self.head_bytes // DTYPE_BYTES[dtype])

    def is_allowed(self, flag: str, device: "AttentionDevice") -> bool:
        """Whether a value of --attention-backend allows this row on a device."""
        if flag != AUTO:
            return self.flag == flag
        return self.is_automatic and (
            self.automatic_on is None or self.automatic_on.includes(device)
        )


@dataclass(frozen=True)
class AttentionNeed:
    """The attention that a layer computes: dtype, head dims and features."""

    dtype: str
    head_dim: int
    value_head_dim: int
    features: frozenset[str]
    is_deterministic: bool = False  # --deterministic-mode

    @classmethod
    def of(cls, config: Config, *, has_window: bool) -> "AttentionNeed":
        """The dtype, head dims and features that attention in a layer has in training."""
        model_config = config.model
        parallel = config.parallel
        is_chunked = model_config.attention_chunk_size is not None
        has_sinks = model_config.softmax_type != "vanilla"
        if model_config.sinks_in_windows_only and not has_window:
            has_sinks = False
        cp_comm_type = parallel.cp_comm_type if parallel.context_parallel_size > 1 else None
        is_wanted = {
            # chunks of positions are segments, as documents are
            "documents": config.data.reset_attention_mask or (has_window and is_chunked),
            "window": has_window and not is_chunked,
            "sinks": has_sinks,
            "softcap": model_config.attn_logit_softcapping is not None,
            "dropout": model_config.attention_dropout > 0,
            "all-gather cp": cp_comm_type == "allgather",
            "ring cp": cp_comm_type in ("p2p", "a2a+p2p"),
        }
        features = frozenset(name for name, wanted in is_wanted.items() if wanted)
        head_dims = (model_config.head_dim, model_config.value_head_dim)
        if has_window:
            head_dims = (model_config.window_head_dim, model_config.window_value_head_dim)
        dtype = config.precision.params_dtype
        return cls(
            dtype,
            *head_dims,
            features,
            is_deterministic=config.train.deterministic_mode,
        )


@dataclass(frozen=True)
class AttentionDevice:
    """The device that computes attention, and its torch."""

    kind: str  # "cpu" or "cuda"
    capability: tuple[int, int] | None = None  # CUDA compute capability
    torch_version: tuple[int, int] = (2, 13)
    cudnn: int = 0  # version of cuDNN, 91002 for 9.10.2; 0 without it
    implementations: frozenset[str] = frozenset()  # of torch's flash operators that are installed

    @classmethod
    def of(cls, device: torch.device) -> "AttentionDevice":
        """The description of a live device with the installed torch."""
        return cls(
            "cpu" if device.type == "cpu" else "cuda",
            compute_capability(device),
            installed_torch(),
            cudnn_version(),
            installed_implementations() if device.type == "cuda" else frozenset(),
        )


def installed_torch() -> tuple[int, int]:
    """Major and minor version of the installed torch."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def _sdpa(backend: str, **options: bool) -> Callable[[bool], AttentionKernel]:
    """The kernel of a row: SDPA with one backend where it is forced, else as torch selects."""
    return lambda is_forced: SdpaKernel((backend,) if is_forced else (), **options)


def _cudnn(is_forced: bool) -> AttentionKernel:
    """cuDNN; where it was chosen automatically, other kernels take calls that it refuses."""
    others = () if is_forced else ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH")
    return SdpaKernel(("CUDNN_ATTENTION", *others))


def _flash(implementation: str) -> Callable[[bool], AttentionKernel]:
    """SDPA with another implementation of torch's flash operators."""

    def build(is_forced: bool) -> AttentionKernel:
        activate_implementation(implementation)
        return SdpaKernel(("FLASH_ATTENTION",), pads_values=True)

    return build


def _varlen(implementation: str) -> Callable[[bool], AttentionKernel]:
    """Packed documents with another implementation of torch's flash operators."""

    def build(is_forced: bool) -> AttentionKernel:
        activate_implementation(implementation)
        return VarlenKernel()

    return build


# by name of the row: the kernel; the argument is whether --attention-backend selected the row, so
# that SDPA must use it
KERNELS: dict[str, Callable[[bool], AttentionKernel]] = {
    "cudnn": _cudnn,
    "sdpa flash 4": _flash("FA4"),
    "varlen flash 4": _varlen("FA4"),
    "sdpa flash 3": _flash("FA3"),
    "varlen flash 3": _varlen("FA3"),
    "sdpa flash": _sdpa("FLASH_ATTENTION", pads_values=True),
    "varlen flash": lambda _: VarlenKernel(),
    "sdpa efficient": _sdpa("EFFICIENT_ATTENTION", repeats_heads=True),
    "tiles": lambda _: TileKernel(),
    "flex": lambda _: FlexKernel(),
    "eager tiles": lambda _: TileKernel(),
    "math": lambda _: DenseKernel("MATH"),
}


def _parse_limit(limit: dict[str, Any]) -> CardLimit:
    """A row of the table of limits; its lists become tuples."""
    columns: dict[str, Any] = {}
    for column, value in limit.items():
        columns[column] = tuple(value) if isinstance(value, list) else value
    return CardLimit(**columns)


def _parse_row(name: str, row: dict[str, Any]) -> AttentionBackend:
    """A row of backends.yaml."""
    columns: dict[str, Any] = {}
    abilities: dict[str, Ability] = {}
    for column, value in row.items():
        if column in ("cpu", "cuda"):
            abilities[column] = Ability(frozenset(value["dtypes"]), frozenset(value["features"]))
        elif column == "wide_heads":
            columns[column] = tuple(_parse_limit(limit) for limit in value)
        elif column == "automatic_on":
            columns[column] = _parse_limit(value)
        else:
            columns[column] = tuple(value) if isinstance(value, list) else value
    return AttentionBackend(name, kernel=KERNELS[name], abilities=abilities, **columns)


TABLE: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
BACKENDS: dict[str, AttentionBackend] = {name: _parse_row(name, row) for name, row in TABLE.items()}


def sort_features(features: frozenset[str]) -> list[str]:
    """The features in the order of FEATURES."""
    return sorted(features, key=FEATURES.index)


def backend_flags() -> list[str]:
    """The values of --attention-backend."""
    return list(dict.fromkeys((AUTO, *(row.flag for row in BACKENDS.values()))))


def lacks(backend: AttentionBackend, need: AttentionNeed, *, device: AttentionDevice) -> list[str]:
    """Why a backend cannot compute an attention of this kind on a device; empty if it can."""
    ability = backend.abilities.get(device.kind)
    if ability is None:
        return [f"runs on {' and '.join(backend.abilities)} only"]
    missing = []
    features = sort_features(need.features - ability.features)
    if features:
        missing.append("has no " + ", ".join(features))
    if need.dtype not in ability.dtypes:
        missing.append(f"takes {' and '.join(sorted(ability.dtypes))}, not {need.dtype}")
    if device.torch_version < backend.torch_version:
        needed = _version_text(backend.torch_version)
        installed = _version_text(device.torch_version)
        missing.append(f"needs torch {needed} or newer, not {installed}")
    if need.is_deterministic and not backend.obeys_deterministic:
        missing.append("is not deterministic")
    if backend.implementation and backend.implementation not in device.implementations:
        package = IMPLEMENTATIONS[backend.implementation]
        missing.append(f"needs the package of {package}")
    if device.kind != "cpu":
        missing += _lacks_capability(backend, need, device=device)
        missing += _lacks_head_dims(backend, need, device=device)
    return missing


def _lacks_capability(
    backend: AttentionBackend, need: AttentionNeed, *, device: AttentionDevice
) -> list[str]:
    """Why a GPU is too old, or too new."""
    if device.capability is None:
        return []
    capability = _version_text(device.capability)
    if device.capability < backend.capability:
        return [f"needs compute capability {_version_text(backend.capability)}, not {capability}"]
    if device.cudnn < backend.first_cudnn:
        return [f"needs cuDNN {_cudnn_text(backend.first_cudnn)}, not {_cudnn_text(device.cudnn)}"]
    last = backend.last_capability
    if last is not None and device.capability > last:
        return [f"takes compute capabilities up to {_version_text(last)}, not {capability}"]
    is_too_old_for_bf16 = need.dtype == "bf16" and device.capability < FIRST_BF16
    if backend.is_in_graphs and is_too_old_for_bf16:
        return [f"takes bf16 from compute capability 8.0 on, not {capability}"]
    return []


def _lacks_head_dims(
    backend: AttentionBackend, need: AttentionNeed, *, device: AttentionDevice
) -> list[str]:
    """Why the head dims do not fit a backend on a GPU."""
    missing = []
    key_dim = need.head_dim
    value_dim = need.value_head_dim
    widest = max(key_dim, value_dim)
    narrowest = min(key_dim, value_dim)
    largest = backend.max_head_dim
    is_wide = largest is not None and widest > largest
    if is_wide and not _takes_wide_heads(backend, need, device=device):
        missing.append(f"takes heads of up to {largest} channels, not {_heads(need)}")
    if narrowest < backend.min_head_dim:
        missing.append(f"takes heads of at least {backend.min_head_dim} channels, not {narrowest}")
    multiple = backend.multiple(need.dtype)
    if key_dim % multiple or value_dim % multiple:
        missing.append(f"takes heads of multiples of {multiple} channels")
    if backend.has_gap and not flash_trains(widest, device.capability):
        missing.append(f"has no backward for heads of {widest} channels on this GPU")
    takes_values = {
        "any": True,
        "as wide as keys": value_dim == key_dim,
        "no wider than keys": value_dim <= key_dim,
    }
    if not takes_values[backend.value_dims]:
        missing.append(f"takes values {backend.value_dims}, not {value_dim} and {key_dim} channels")
    return missing


def _takes_wide_heads(
    backend: AttentionBackend, need: AttentionNeed, *, device: AttentionDevice
) -> bool:
    """Whether a backend has these head dims, above its largest, on this GPU."""
    dims = (need.head_dim, need.value_head_dim)
    return any(limit.dims == dims and limit.includes(device) for limit in backend.wide_heads)


def _heads(need: AttentionNeed) -> str:
    """Head dims in a message.

    >>> _heads(AttentionNeed("bf16", 192, 128, frozenset()))
    '192 and 128'
    """
    if need.head_dim == need.value_head_dim:
        return str(need.head_dim)
    return f"{need.head_dim} and {need.value_head_dim}"


def _cudnn_text(version: int) -> str:
    """A version of cuDNN.

    >>> _cudnn_text(91002), _cudnn_text(0)
    ('9.10.2', 'none')
    """
    major, rest = divmod(version, 10_000)
    minor, patch = divmod(rest, 100)
    return f"{major}.{minor}.{patch}" if version else "none"


def _version_text(version: tuple[int, int]) -> str:
    """A version or a compute capability as text: 2.10."""
    return ".".join(map(str, version))


def choose_backend(flag: str, need: AttentionNeed, *, device: AttentionDevice) -> AttentionBackend:
    """The first backend that can compute a need.

    Args:
        flag: "auto" for all backends, or one value of --attention-backend.
        need: attention of a layer.
        device: device that computes it.

    Raises:
        ConfigError: none of the flag's backends can.

    >>> h100 = AttentionDevice("cuda", (9, 0))
    >>> need = AttentionNeed("bf16", 128, 128, frozenset({"documents"}))
    >>> choose_backend("auto", need, device=h100).name
    'varlen flash'
    """
    reasons = []
    for backend in BACKENDS.values():
        if not backend.is_allowed(flag, device):
            continue
        missing = lacks(backend, need, device=device)
        if not missing:
            return backend
        reasons.append(f"{backend.name} {', '.join(missing)}")
    raise ConfigError(
        f"--attention-backend {flag} cannot compute the attention of this model",
        why="; ".join(reasons),
        fix="leave --attention-backend out, or set it to local",
    )


@dataclass(frozen=True)
class AttentionChoice:
    """The backends of a model's layers."""

    # by whether layers have a window: their backend and their need
    backends: Mapping[bool, tuple[AttentionBackend, AttentionNeed]]
    is_forced: bool  # whether --attention-backend selected them
    # why they are not the backends that --attention-backend selects; empty if they are
    warning: str = ""

    @classmethod
    def of(cls, config: Config, device: AttentionDevice) -> "AttentionChoice":
        """The choice for a configuration.

        All backends compute the same attention. If the selected one cannot compute a layer on this
        device, the backends of "auto" are used, so that a script for another device runs.
        """
        flag = config.train.attention_backend
        kinds = sorted(set(config.model.window_layers))
        needs = {
            has_window: AttentionNeed.of(config, has_window=has_window) for has_window in kinds
        }

        def choose(flag: str) -> dict[bool, tuple[AttentionBackend, AttentionNeed]]:
            return {
                kind: (choose_backend(flag, need, device=device), need)
                for kind, need in needs.items()
            }

        try:
            return cls(choose(flag), is_forced=flag != AUTO)
        except ConfigError as error:
            warning = (
                f"{error.what}: {error.why}; the backends of --attention-backend auto are used"
            )
            return cls(choose(AUTO), is_forced=False, warning=warning)

    def kernels(self) -> LayerKernels:
        """The kernels of the layers."""
        full: AttentionKernel = SdpaKernel()
        window: AttentionKernel = TileKernel()
        for has_window, (backend, _) in self.backends.items():
            if has_window:
                window = backend.kernel(self.is_forced)
            else:
                full = backend.kernel(self.is_forced)
        return LayerKernels(full, window)

    def __str__(self) -> str:
        """The text in the header of a run.

        >>> str(AttentionChoice.of(Config(), AttentionDevice("cpu")))
        'sdpa flash (fp32)'
        """
        texts = []
        for backend, need in self.backends.values():
            details = ", ".join([need.dtype, *sort_features(need.features)])
            texts.append(f"{backend.name} ({details})")
        return "; ".join(dict.fromkeys(texts))
