"""NVIDIA's driver and devices, as the kernel shows them: why torch sees no GPU."""

import os
import re
from collections.abc import Mapping
from pathlib import Path

import torch

# by CUDA version of torch: the first driver that runs it (NVIDIA, CUDA Compatibility: minor version
# compatibility)
FIRST_DRIVERS = {"11": "450.80.02", "12": "525.60.13", "13": "580.65.06"}
VENDOR = "0x10de"  # NVIDIA's, of PCI devices


def hides_gpus(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether the user shows CUDA no device."""
    return environment.get("CUDA_VISIBLE_DEVICES") in ("", "-1")


def driver_version(root: Path = Path("/")) -> str | None:
    """The version of the loaded NVIDIA driver ("580.65.06"); None without one.

    `root` holds proc, dev and sys.
    """
    try:
        text = (root / "proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    version = re.search(r"\d{3}\.\d+(\.\d+)?", text)
    return version[0] if version else None


def unseen_gpu_reason(root: Path = Path("/")) -> str:
    """Why torch sees no GPU of this machine, and the cure; empty where there is no NVIDIA device.

    Args:
        root: folder that holds proc, dev and sys.
    """
    driver = driver_version(root)
    cuda = torch.version.cuda
    if driver is None:
        vendors = {path.read_text().strip() for path in root.glob("sys/bus/pci/devices/*/vendor")}
        return "no NVIDIA driver is loaded; install one" if VENDOR in vendors else ""
    if cuda is None:
        return f"torch {torch.__version__} is built without CUDA; install a CUDA build of it"
    if not (root / "dev/nvidiactl").exists():
        return (
            "this container was given no device; start it with --gpus all (Kubernetes: a limit of "
            "nvidia.com/gpu)"
        )
    needed = FIRST_DRIVERS.get(cuda.partition(".")[0], "0")
    if _numbers(driver) < _numbers(needed):
        fix = "update it, or install a torch for an older CUDA"
        return f"driver {driver} is too old for CUDA {cuda} of torch, which needs {needed}; {fix}"
    return "CUDA does not start; see nvidia-smi and dmesg"


def _numbers(version: str) -> list[int]:
    return [int(number) for number in version.split(".")]
