"""Names of GPUs as people write them, and rows that are complete."""

import pytest

from nanotrain.errors import ConfigError
from nanotrain.planner.hardware import gpu_of, gpus


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("h100", "h100"),
        ("H100 80 GB", "h100"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("H100 96 GB HBM2e", "h100-96gb"),
        ("A100 40 GB", "a100-40gb"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("a100", "a100-80gb"),
        ("A100_80GB", "a100-80gb"),
        ("B200 180 GB", "b200"),
        ("GB200", "gb200"),
        ("NVIDIA GB200 NVL72", "gb200"),
        ("AMD Instinct MI300X", "mi300x"),
    ],
)
def test_a_gpu_is_found_by_the_names_of_tools_and_tables(name: str, row: str) -> None:
    assert gpu_of(name).name == row


def test_an_unknown_gpu_is_one_error_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="unknown GPU H1000: .*; did you mean h100"):
        gpu_of("H1000")
    with pytest.raises(
        ConfigError, match=r"unknown GPU abacus: the planner has v100, .*; name the nearest of them"
    ):
        gpu_of("abacus")


def test_every_row_is_complete_and_plausible() -> None:
    for gpu in gpus().values():
        assert set(gpu.reachable) == {"bf16", *gpu.peak_flops}  # bf16 scales the measured attention
        assert all(0.3 < share < 1 for share in gpu.reachable.values())
        assert gpu.memory_bytes < 310e9 and gpu.memory_bandwidth < 10e12
        assert (
            gpu.network.bandwidth <= gpu.node.bandwidth and gpu.node.latency <= gpu.network.latency
        )
        assert gpu.kernels in gpus() and gpu.collectives in gpus()


def test_a_dtype_without_matrix_units_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"h100 has no nvfp4 products: .*; use fp8"):
        gpu_of("h100").peak("nvfp4")
    with pytest.raises(ConfigError, match="a100-80gb has no fp8 products: .*; use bf16"):
        gpu_of("a100").peak("fp8")
