"""Why torch sees no GPU, by what the kernel shows of NVIDIA's driver and devices."""

from pathlib import Path

import pytest
import torch

from nanotrain.comm import device
from nanotrain.comm.driver import driver_version, hides_gpus, unseen_gpu_reason

OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (dvs-builder)  Sun Jul 27"
OLD = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\nGCC version:  gcc 12.3.0"


def machine(root: Path, driver: str | None, *, has_device: bool = True) -> Path:
    for name, text in {
        "sys/bus/pci/devices/0000:00:00.0/vendor": "0x8086\n",
        "sys/bus/pci/devices/0000:01:00.0/vendor": "0x10de\n",
        "proc/driver/nvidia/version": driver,
        "dev/nvidiactl": "" if has_device else None,
    }.items():
        if text is not None:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("driver", "has_device", "cuda", "reason"),
    [
        (None, False, "13.0", "no NVIDIA driver is loaded"),
        (OPEN, True, None, f"torch {torch.__version__} is built without CUDA"),
        (OPEN, False, "13.0", "this container was given no device; start it with --gpus all"),
        (
            OLD,
            True,
            "13.0",
            "driver 535.104.05 is too old for CUDA 13.0 of torch, which needs 580.65.06",
        ),
        (OLD, True, "12.8", "CUDA does not start"),
        (OPEN, True, "13.0", "CUDA does not start"),
    ],
)
def test_the_reason_is_named(driver, has_device, cuda, reason, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert unseen_gpu_reason(machine(tmp_path, driver, has_device=has_device)).startswith(reason)


def test_a_machine_without_a_device_has_no_reason(tmp_path: Path) -> None:
    assert unseen_gpu_reason(tmp_path) == "" and driver_version(tmp_path) is None


def test_auto_on_the_cpu_of_a_machine_with_a_gpu_is_a_line_unless_the_gpus_are_hidden(
    monkeypatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(device, "unseen_gpu_reason", lambda: "driver 535 is too old")
    line = "training on the CPU of a machine with an NVIDIA GPU: driver 535 is too old"
    assert device.describe_unused_gpus("auto", environment={}) == line
    assert device.describe_unused_gpus("auto", environment={"CUDA_VISIBLE_DEVICES": ""}) == ""
    assert device.describe_unused_gpus("cpu", environment={}) == ""
    monkeypatch.setattr(device, "unseen_gpu_reason", str)
    assert device.describe_unused_gpus("auto", environment={}) == ""
    assert hides_gpus({"CUDA_VISIBLE_DEVICES": "-1"}) and not hides_gpus(
        {"CUDA_VISIBLE_DEVICES": "0"}
    )
