"""The table of attention backends: the features of each, and the choice of one for the layers of a
model.

BACKENDS           the rows of backends.yaml, in the order of preference; a row is a kernel and its limits
AttentionNeed      dtype, head dims and features of a layer
AttentionDevice    the kind of device; both are pure data, so a choice needs no GPU
backend_flags      the values of --attention-backend
choose_backend     the first backend that can compute a need, of all or of one value of --attention-backend
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
from nanotrain.attention.flex import FlexKernel
from nanotrain.attention.sdpa import DenseKernel, LayerKernels, SdpaKernel
from nanotrain.attention.varlen import VarlenKernel
from nanotrain.comm.device import compute_capability, cudnn_version
from nanotrain.config.config import Config
from nanotrain.errors import ConfigError

FEATURES = ("documents", "window", "sinks", "softcap", "dropout", "all-gather cp", "ring cp")
EVERYTHING = frozenset(FEATURES)
AUTO = "auto"  # the value of --attention-backend that allows every automatic row
HOPPER = (9, 0)
# the first CUDA compute capability with it, of kernels that older ones have too
FIRST_BF16 = (8, 0)


@dataclass(frozen=True)
class Ability:
    """Dtypes and features of a backend on one kind of device; all compute causal attention with
    grouped queries.
    """

    dtypes: frozenset[str]
    features: frozenset[str]  # of FEATURES


@dataclass(frozen=True)
class AttentionBackend:
    """One row of the table."""

    name: str
    flag: str  # the value of --attention-backend that selects it
    kernel: Callable[[bool], AttentionKernel]  # of KERNELS
    abilities: Mapping[str, Ability]  # by kind of device
    min_head_dim: int = 1
    max_head_dim: int | None = None
    # on compute capability 9.0, and the first cuDNN that has it
    max_head_dim_hopper: tuple[int, int] | None = None
    head_dim_multiple: int = 1
    # beside the head dim of keys: any, "as wide as keys", or "no wider than keys"
    value_dims: str = "any"
    capability: tuple[int, int] = (0, 0)  # the first CUDA compute capability
    torch_version: tuple[int, int] = (2, 10)  # the first one
    is_deterministic: bool = False  # its backward on a GPU; on a CPU all are
    is_in_graphs: bool = False  # whether a compiled block has it in its graph, on one cp rank
    is_automatic: bool = True  # whether --attention-backend auto may choose it


@dataclass(frozen=True)
class AttentionNeed:
    """The attention that a layer computes: dtype, head dims and features."""

    dtype: str
    head_dim: int
    value_head_dim: int
    features: frozenset[str]

    @classmethod
    def of(cls, config: Config, *, has_window: bool) -> "AttentionNeed":
        """The need of a layer of a model in training."""
        model, parallel = config.model, config.parallel
        cp_comm_type = parallel.cp_comm_type if parallel.context_parallel_size > 1 else None
        is_chunked = model.attention_chunk_size is not None  # chunks are segments, as documents are
        is_wanted = {
            "documents": config.data.reset_attention_mask or has_window and is_chunked,
            "window": has_window and not is_chunked,
            "sinks": model.softmax_type != "vanilla"
            and (has_window or not model.sinks_in_windows_only),
            "softcap": model.attn_logit_softcapping is not None,
            "dropout": model.attention_dropout > 0,
            "all-gather cp": cp_comm_type == "allgather",
            "ring cp": cp_comm_type == "p2p",
        }
        features = frozenset(name for name, wanted in is_wanted.items() if wanted)
        return cls(config.precision.params_dtype, model.head_dim, model.value_head_dim, features)


@dataclass(frozen=True)
class AttentionDevice:
    """The device that computes attention, and its torch."""

    kind: str  # "cpu" or "cuda"
    capability: tuple[int, int] | None = None  # CUDA compute capability
    torch_version: tuple[int, int] = (2, 13)
    cudnn: int = 0  # its version, 91002 for 9.10.2; 0 without it

    @classmethod
    def of(cls, device: torch.device) -> "AttentionDevice":
        """The description of a live device with the installed torch."""
        return cls(
            "cpu" if device.type == "cpu" else "cuda",
            compute_capability(device),
            installed_torch(),
            cudnn_version(),
        )


def installed_torch() -> tuple[int, int]:
    """Major and minor version of the installed torch."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def _sdpa(backend: str, **options: bool) -> Callable[[bool], AttentionKernel]:
    return lambda is_forced: SdpaKernel(backend if is_forced else None, **options)


# by name of the row: the kernel; the argument says whether --attention-backend names the row, so
# SDPA must use it
KERNELS: dict[str, Callable[[bool], AttentionKernel]] = {
    "sdpa flash": _sdpa("FLASH_ATTENTION", pads_values=True),
    "varlen flash": lambda _: VarlenKernel(),
    "cudnn": _sdpa("CUDNN_ATTENTION"),
    "sdpa efficient": _sdpa("EFFICIENT_ATTENTION", repeats_heads=True),
    "tiles": lambda _: TileKernel(),
    "flex": lambda _: FlexKernel(),
    "eager tiles": lambda _: TileKernel(),
    "math": lambda _: DenseKernel("MATH"),
}


def _row(name: str, row: dict[str, Any]) -> AttentionBackend:
    """A row of backends.yaml."""
    abilities: dict[str, Ability] = {
        kind: Ability(**{key: frozenset(names) for key, names in row.pop(kind).items()})
        for kind in ("cpu", "cuda")
        if kind in row
    }
    row |= {
        key: tuple(row[key])
        for key in ("capability", "torch_version", "max_head_dim_hopper")
        if key in row
    }
    return AttentionBackend(name, kernel=KERNELS[name], abilities=abilities, **row)


TABLE: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
BACKENDS: dict[str, AttentionBackend] = {name: _row(name, row) for name, row in TABLE.items()}


def named(features: frozenset[str]) -> list[str]:
    """The features in the order of FEATURES."""
    return sorted(features, key=FEATURES.index)


def backend_flags() -> list[str]:
    """The values of --attention-backend."""
    return list(dict.fromkeys((AUTO, *(row.flag for row in BACKENDS.values()))))


def lacks(backend: AttentionBackend, need: AttentionNeed, *, device: AttentionDevice) -> list[str]:
    """Why a backend cannot compute a need on a device; empty if it can."""
    ability = backend.abilities.get(device.kind)
    if ability is None:
        return [f"runs on {' and '.join(backend.abilities)} only"]
    missing = []
    if need.features - ability.features:
        missing.append("has no " + ", ".join(named(need.features - ability.features)))
    if need.dtype not in ability.dtypes:
        missing.append(f"takes {' and '.join(sorted(ability.dtypes))}, not {need.dtype}")
    if device.torch_version < backend.torch_version:
        missing.append(
            f"needs torch {_dotted(backend.torch_version)} or newer, not {_dotted(device.torch_version)}"
        )
    return (
        missing
        if device.kind == "cpu"
        else [*missing, *_lacks_on_gpu(backend, need, device=device)]
    )


def _lacks_on_gpu(
    backend: AttentionBackend, need: AttentionNeed, *, device: AttentionDevice
) -> list[str]:
    missing, width = [], max(need.head_dim, need.value_head_dim)
    if device.capability is not None and device.capability < backend.capability:
        missing.append(
            f"needs compute capability {_dotted(backend.capability)}, not {_dotted(device.capability)}"
        )
    elif (
        backend.is_in_graphs
        and need.dtype == "bf16"
        and (device.capability or FIRST_BF16) < FIRST_BF16
    ):
        missing.append(
            f"takes bf16 from compute capability 8.0 on, not {_dotted(device.capability or FIRST_BF16)}"
        )
    most, wide = backend.max_head_dim, backend.max_head_dim_hopper
    if wide is not None and device.capability == HOPPER and device.cudnn >= wide[1]:
        most = wide[0]
    if most is not None and width > most:
        missing.append(f"takes heads of up to {most} channels, not {width}")
    if (narrow := min(need.head_dim, need.value_head_dim)) < backend.min_head_dim:
        missing.append(f"takes heads of at least {backend.min_head_dim} channels, not {narrow}")
    if need.head_dim % backend.head_dim_multiple or need.value_head_dim % backend.head_dim_multiple:
        missing.append(f"takes heads of multiples of {backend.head_dim_multiple} channels")
    is_wider, is_equal = need.value_head_dim > need.head_dim, need.value_head_dim == need.head_dim
    if {"any": False, "as wide as keys": not is_equal, "no wider than keys": is_wider}[
        backend.value_dims
    ]:
        missing.append(
            f"takes values {backend.value_dims}, not {need.value_head_dim} and {need.head_dim} channels"
        )
    return missing


def _dotted(version: tuple[int, int]) -> str:
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
    >>> choose_backend("auto", AttentionNeed("bf16", 128, 128, frozenset({"documents"})), device=h100).name
    'varlen flash'
    """
    reasons = []
    for backend in BACKENDS.values():
        if backend.flag != flag and not (flag == AUTO and backend.is_automatic):
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
    """The backends of a model's layers.

    Attributes: backends: backends and needs of layers without a window (False) and of layers with a
        window (True). is_forced: whether --attention-backend selected them. warning: why they are
        not the backends that --attention-backend selects; empty if they are.
    """

    backends: Mapping[bool, tuple[AttentionBackend, AttentionNeed]]
    is_forced: bool
    warning: str = ""

    @classmethod
    def of(cls, config: Config, device: AttentionDevice) -> "AttentionChoice":
        """The choice for a configuration.

        All backends compute the same attention. If the selected one cannot compute a layer on this
        device, those of "auto" are used, so that a script written for another device runs.
        """
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
            return cls(
                choose(config.train.attention_backend), config.train.attention_backend != AUTO
            )
        except ConfigError as error:
            warning = (
                f"{error.what}: {error.why}; the backends of --attention-backend auto are used"
            )
            return cls(choose(AUTO), False, warning)

    def kernels(self) -> LayerKernels:
        """The kernels of the layers."""
        kernels = {
            kind: backend.kernel(self.is_forced) for kind, (backend, _) in self.backends.items()
        }
        return LayerKernels(kernels.get(False) or SdpaKernel(), kernels.get(True) or TileKernel())

    def __str__(self) -> str:
        """The text in the header of a run.

        >>> str(AttentionChoice.of(Config(), AttentionDevice("cpu")))
        'sdpa flash (fp32)'
        """
        pairs = self.backends.values()
        texts = [
            f"{row.name} ({', '.join((need.dtype, *named(need.features)))})" for row, need in pairs
        ]
        return "; ".join(dict.fromkeys(texts))
