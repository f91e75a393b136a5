"""Peak matrix throughput per device, the denominator of MFU (model FLOPs utilization).

Dense peaks (no structured sparsity) of the vendors' data sheets, in FLOP/s. fp32 is the plain fp32 rate: torch does not
use TF32 for fp32 matrices by default.
"""

import re

Peaks = dict[str, float]

# device-name pattern -> dtype -> peak; the first match counts, so specific names come before general ones
PEAK_FLOPS: dict[str, Peaks] = {
    # NVIDIA V100 data sheet: no bf16
    r"\bV100-SXM": {"fp16": 125e12, "fp32": 15.7e12},
    # NVIDIA A100 and A800 data sheets
    r"\bA[18]00\b": {"bf16": 312e12, "fp16": 312e12, "fp32": 19.5e12},
    # NVIDIA L4 and L40S data sheets (half of the sparse figures)
    r"\bL4\b": {"fp8": 242e12, "bf16": 121e12, "fp16": 121e12, "fp32": 30.3e12},
    r"\bL40S\b": {"fp8": 733e12, "bf16": 362.05e12, "fp16": 362.05e12, "fp32": 91.6e12},
    # NVIDIA H100 data sheet and Hopper architecture paper: PCIe and NVL cards run slower than SXM modules
    r"\bH100 PCIe\b": {"fp8": 1513e12, "bf16": 756e12, "fp16": 756e12, "fp32": 51.2e12},
    r"\bH[12]00 NVL\b": {"fp8": 1671e12, "bf16": 835.5e12, "fp16": 835.5e12, "fp32": 60e12},
    # SXM modules report "H100 80GB HBM3", Grace Hopper "GH200 480GB", H20 is a slower part and matches no row
    r"\b(H100|H200|H800|GH200)\b": {"fp8": 1978.9e12, "bf16": 989.4e12, "fp16": 989.4e12, "fp32": 66.9e12},
    # NVIDIA HGX B200 and GB200 NVL72 data sheets, per GPU
    r"\bB200\b": {"fp8": 4.5e15, "bf16": 2.25e15, "fp16": 2.25e15, "fp32": 75e12},
    r"\bGB200\b": {"fp8": 5e15, "bf16": 2.5e15, "fp16": 2.5e15, "fp32": 80e12},
    # AMD Instinct MI300X data sheet
    r"\bMI300X\b": {"fp8": 2614.9e12, "bf16": 1307.4e12, "fp16": 1307.4e12, "fp32": 163.4e12},
}


def peak_flops(device_name: str, dtype: str) -> float | None:
    """The dense matrix peak of a device in FLOP/s, or None if unknown (CPUs, MIG slices, unlisted cards).

    >>> peak_flops("NVIDIA H100 80GB HBM3", "bf16")
    989400000000000.0
    >>> peak_flops("AMD EPYC 7763", "fp32") is None
    True
    """
    if " MIG " in device_name:  # the slice's fraction of the peak is unknown
        return None
    for pattern, peaks in PEAK_FLOPS.items():
        if re.search(pattern, device_name):
            return peaks.get(dtype)
    return None
