"""The attention kernel of a layer of nanotrain on a GPU, and its rate where it is not measured.

kernels.json has the best kernels of each GPU: cuDNN on Hopper and Blackwell, FlashAttention 2 on an
A100. Where backends.yaml gives a layer FlashAttention 2 on Hopper or Blackwell, it is slower, and
values that are narrower than keys are padded.
"""

from functools import lru_cache

from nanotrain.attention.backends import AttentionBackend, AttentionNeed, choose_backend
from nanotrain.errors import ConfigError
from nanotrain.planner.hardware import GPU
from nanotrain.planner.limits import attention_device

# Forward FLOP/s of FlashAttention 2 by major compute capability. Hopper: 35 % of an H100's peak
# (Shah et al. 2024, "FlashAttention-3", abstract). Blackwell: assumed, the same instructions per
# clock and multiprocessor on 148 of them.
FLASH_2_FLOPS = {9: 3.46e14, 10: 4.05e14}
# rows of backends.yaml that FlashAttention 2 computes, or kernels that are no faster
FLASH_2 = {"sdpa flash", "varlen flash", "sdpa efficient", "flex"}


def attention_flops_per_s(gpu: GPU, need: AttentionNeed, *, flag: str) -> float | None:
    """The forward FLOP/s of a layer's kernel; None: the measured kernels are used.

    Args:
        gpu: the device.
        need: attention of the layer.
        flag: --attention-backend.
    """
    if gpu.capability is None or gpu.capability[0] not in FLASH_2_FLOPS:
        return None
    row = _row(flag, need, gpu=gpu)
    is_slow = row.name in FLASH_2 or (row.name == "tiles" and not _has_cudnn(need, gpu))
    return FLASH_2_FLOPS[gpu.capability[0]] if is_slow else None


@lru_cache(maxsize=256)
def _row(flag: str, need: AttentionNeed, *, gpu: GPU) -> AttentionBackend:
    """The row of backends.yaml, as a run chooses it."""
    device = attention_device(gpu)
    try:
        return choose_backend(flag, need, device=device)
    except ConfigError:  # a run warns and takes the automatic one
        return choose_backend("auto", need, device=device)


def _has_cudnn(need: AttentionNeed, gpu: GPU) -> bool:
    """Whether cuDNN computes the tiles of a call."""
    plain = AttentionNeed(need.dtype, need.head_dim, need.value_head_dim, frozenset())
    return _row("auto", plain, gpu=gpu).name == "cudnn"
