"""Names of GPUs as people write them, and rows that are complete."""

from dataclasses import replace

import pytest

from nanotrain.errors import ConfigError
from nanotrain.planner.hardware import GPU, gpu_of, gpus
from nanotrain.planner.prediction import predict
from tests.planner.scenarios import llama


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


def test_gpus_of_nvidia_have_a_compute_capability_and_others_have_none() -> None:
    # https://developer.nvidia.com/cuda-gpus
    expected = {"v100": (7, 0), "a100-40gb": (8, 0), "l40s": (8, 9), "h20": (9, 0), "gh200": (9, 0)}
    expected |= {"b200": (10, 0), "gb200": (10, 0), "b300": (10, 3), "gb300": (10, 3)}
    for name, capability in expected.items():
        assert gpus()[name].capability == capability
    others = {name for name, gpu in gpus().items() if gpu.capability is None}
    assert others == {"mi300x", "mi325x", "mi355x", "cpu"}
    with_scans = {name for name, gpu in gpus().items() if gpu.has_scan_kernels}
    older = {name for name, gpu in gpus().items() if gpu.is_before_hopper}
    assert older == {"v100", "a100-80gb", "a100-40gb", "a800", "l40s"}
    assert with_scans == gpus().keys() - older - others


@pytest.mark.parametrize("name", ["a100", "h100", "b200"])
@pytest.mark.parametrize("engine", ["nanotrain", "megatron"])
def test_the_name_of_a_gpu_decides_nothing(name: str, engine: str) -> None:
    gpu = gpu_of(name)
    settings = {"tensor_model_parallel_size": 2, "micro_batch_size": 2, "seq_length": 4096}

    def bytes_and_time(gpu: GPU) -> tuple[object, float]:
        prediction = predict(llama(gpu=gpu, engine=engine, deterministic_mode=True, **settings))
        return prediction.memory, prediction.time.total

    for other in ("x1", "a1", "h1"):
        assert bytes_and_time(replace(gpu, name=other)) == bytes_and_time(gpu)
