"""The first row of the table that can computes a scan."""

import pytest
import torch

from nanotrain.attention import scan_kernels
from nanotrain.attention.scan_kernels import chosen_kernel, kernel_for, missing_packages

ALL = frozenset({"fla", "mamba_ssm", "causal_conv1d"})


@pytest.mark.parametrize(
    ("rule", "installed", "options", "expected"),
    [
        ("mamba2", ALL, {}, "mamba_ssm"),
        ("mamba2", ALL, {"has_rate": False}, "fla"),
        ("mamba2", {"fla"}, {}, "fla"),
        ("mamba2", set(), {}, "triton"),
        ("kda", ALL, {}, "fla"),
        ("gated_delta_net", {"mamba_ssm"}, {}, "triton"),
        ("gated_delta_net", set(), {"has_triton": False}, "torch"),
        ("gated_delta_net", ALL, {"is_low": False}, "torch"),
        ("convolution", ALL, {}, "causal_conv1d"),
        ("convolution", {"fla"}, {}, "torch"),
    ],
)
def test_the_first_row_that_can_is_taken(rule, installed, options, expected) -> None:
    assert chosen_kernel(rule, installed=frozenset(installed), **options) == expected


def test_a_cpu_has_the_operators_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan_kernels, "installed_packages", lambda: ALL)
    assert kernel_for("mamba2", torch.zeros(1, dtype=torch.bfloat16), has_rate=True) == "torch"


def test_packages_that_a_model_lacks() -> None:
    missing = missing_packages(["mamba2", "kda", "attention"], installed=frozenset())
    assert [kernel.package for kernel in missing] == ["fla", "mamba_ssm"]
    assert "KDA" in missing[0].advice and "pip install mamba-ssm" in missing[1].advice
    both = missing_packages(["kda", "gated_delta_net"], installed=frozenset())
    assert [kernel.package for kernel in both] == ["fla"]
    assert missing_packages(["mamba2", "kda"], installed=frozenset({"fla"})) == ()
