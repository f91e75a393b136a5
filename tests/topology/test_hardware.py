"""Peaks of the listed cards, None for all others."""

import pytest

from nanotrain.topology.hardware import peak_flops


@pytest.mark.parametrize(
    ("device_name", "dtype", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", "bf16", 312e12),
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4e12),
        ("NVIDIA H100 80GB HBM3", "fp32", 66.9e12),
        ("NVIDIA H100 PCIe", "bf16", 756e12),
        ("NVIDIA H100 NVL", "bf16", 835.5e12),
        ("NVIDIA H200", "bf16", 989.4e12),
        ("NVIDIA GH200 480GB", "fp16", 989.4e12),
        ("NVIDIA H100 80GB HBM3", "fp8", 1978.9e12),
        ("NVIDIA H200", "fp8", 1978.9e12),
        ("NVIDIA B200", "bf16", 2.25e15),
        ("NVIDIA GB200", "bf16", 2.5e15),
        ("Tesla V100-SXM2-32GB", "fp16", 125e12),
    ],
)
def test_a_known_card_has_the_peak_of_its_data_sheet(device_name: str, dtype: str, peak: float) -> None:
    assert peak_flops(device_name, dtype) == peak


@pytest.mark.parametrize(
    ("device_name", "dtype"),
    [
        ("AMD EPYC 7763 64-Core Processor", "fp32"),
        ("NVIDIA RTX A1000", "bf16"),  # contains the name of another card
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bf16"),
        ("Tesla V100-SXM2-32GB", "bf16"),
        ("cpu", "bf16"),
    ],
)
def test_an_unlisted_card_has_no_peak(device_name: str, dtype: str) -> None:
    assert peak_flops(device_name, dtype) is None
