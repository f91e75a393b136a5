"""The rate of attention by backend row and GPU."""

import pytest

from nanotrain.attention.backends import AttentionNeed
from nanotrain.planner.attention_kernel import FLASH_2_FLOPS, attention_flops_per_s
from nanotrain.planner.hardware import gpu_of
from nanotrain.planner.kernels import AttentionShape, attention_s, attention_work

MLA = (192, 128)


@pytest.mark.parametrize(
    ("gpu", "flag", "dims", "features", "generation"),
    [
        ("h100", "auto", (128, 128), (), None),
        ("b200", "auto", MLA, (), None),  # cuDNN without padding
        ("b200", "flash", MLA, (), 10),
        ("h100", "flash", (128, 128), (), 9),
        ("b200", "auto", (256, 256), (), 10),
        ("b200", "auto", (128, 128), ("documents",), 10),
        ("h100", "auto", (128, 128), ("ring cp",), None),  # tiles of cuDNN
        ("h100", "auto", (256, 256), ("ring cp",), 9),  # tiles of flash
        ("gb300", "fused", MLA, (), None),
        ("a100-80gb", "auto", MLA, (), None),  # measured with FlashAttention 2
    ],
)
def test_flash_attention_2_is_slower_than_measured_kernels_of_new_gpus(
    gpu: str,
    flag: str,
    dims: tuple[int, int],
    features: tuple[str, ...],
    generation: int | None,
) -> None:
    need = AttentionNeed("bf16", *dims, frozenset(features))
    expected = None if generation is None else FLASH_2_FLOPS[generation]
    assert attention_flops_per_s(gpu_of(gpu), need, flag=flag) == expected


def test_a_slow_kernel_pads_values_and_takes_its_own_rate() -> None:
    """3 to 4 times the time on a B200, about twice on an H100."""
    call = AttentionShape(1, 128, 128, 4096, *MLA)
    padded = AttentionShape(1, 128, 128, 4096, 192, 192)
    for name, generation, lowest, highest in (("b200", 10, 3.0, 4.5), ("h100", 9, 1.8, 2.8)):
        gpu, flops_per_s = gpu_of(name), FLASH_2_FLOPS[generation]
        slow_s = attention_s(gpu, call, flops_per_s=flops_per_s)
        assert slow_s == attention_s(gpu, padded, flops_per_s=flops_per_s)
        assert slow_s >= 0.9 * attention_work(padded).flops / flops_per_s
        assert lowest < slow_s / attention_s(gpu, call) < highest
