"""The checks that a run makes on a GPU, made before there is one."""

from nanotrain.attention.backends import AttentionChoice, AttentionDevice
from nanotrain.comm.device import PLANNED_CUDNN
from nanotrain.config.config import Config
from nanotrain.config.rules.check import check_groups
from nanotrain.errors import ErrorCollector
from nanotrain.planner.hardware import GPU
from nanotrain.precision.fp8 import require_fp8

PLANNED_TORCH = (2, 13)


def require_runnable(config: Config, gpu: GPU) -> None:
    """Check that ranks on a GPU would accept a configuration: the checks of their device.

    Args:
        config: a validated configuration.
        gpu: GPU of every rank.

    Raises:
        ConfigError: all mistakes in one error.
    """
    errors = ErrorCollector()
    with errors:
        require_fp8(config.precision.fp8, gpu.capability)
    with errors:
        AttentionChoice.of(config, attention_device(gpu))
    with errors:
        check_groups(config, "cpu" if gpu.is_cpu else "cuda")
    errors.raise_errors()


def attention_device(gpu: GPU) -> AttentionDevice:
    """The GPU as the choice of attention backends sees it."""
    if gpu.is_cpu:
        return AttentionDevice("cpu", torch_version=PLANNED_TORCH)
    return AttentionDevice("cuda", gpu.capability, PLANNED_TORCH, PLANNED_CUDNN)
