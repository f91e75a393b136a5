"""What is found before a run: all mistakes in one message, on the device that it has."""

from dataclasses import replace

import pytest
import torch

from nanotrain.comm.generations import SUPERVISED
from nanotrain.comm.parallel_context import Launch
from nanotrain.config.load import load
from nanotrain.errors import ConfigError, EnvironmentFault
from nanotrain.train import checks
from nanotrain.train.checks import (
    CHECKS,
    Start,
    check_linear_attention,
    check_ranks_may_leave,
    check_settings,
    check_token_dispatcher,
    check_trackers,
    run_checks,
)
from tests.train.small_run import SIZES


def start_of(*flags: str) -> Start:
    return Start(load([*SIZES, *flags]).config, Launch())


def test_all_mistakes_of_a_group_are_one_message(tmp_path) -> None:
    given = "--optimizer-cpu-offload --num-layers 2 --cpu-offloading --cpu-offloading-num-layers 1"
    flags = [*given.split(), "--run-dir", str(tmp_path / "run")]
    offload = "no effect: --optimizer-cpu-offload and --cpu-offloading"
    with pytest.raises(
        ConfigError, match=f"(?s)2 mistakes:.*there is no corpus to train on.*{offload}"
    ):
        run_checks(start_of(*flags))
    assert not list(tmp_path.iterdir()), "nothing is written"


def test_only_the_last_group_asks_for_the_device(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(
        checks.device, "pick_device", lambda *_: pytest.fail("a device was touched")
    )
    start = start_of("--mock-data", "--run-dir", str(tmp_path))
    for row in (row for group in CHECKS[:-1] for row in group):
        row(start)


def test_a_layout_without_a_smaller_world_is_refused_where_a_rank_may_leave(monkeypatch) -> None:
    flags = "--mock-data --inprocess-restart --inprocess-min-ranks 2 --global-batch-size 4"
    start = replace(start_of(*flags.split()), launch=Launch(0, 0, 2, is_distributed=True))
    monkeypatch.delenv(SUPERVISED, raising=False)
    check_ranks_may_leave(start)  # the agent of torchrun ends all ranks
    monkeypatch.setenv(SUPERVISED, "1")
    with pytest.raises(ConfigError, match="no rank of 2 ranks can leave the run"):
        check_ranks_may_leave(start)


def test_a_missing_package_is_named_before_the_run(monkeypatch):
    start = start_of("--mock-data", "--prometheus-port", "9400")
    check_trackers(start)
    monkeypatch.setattr(checks, "find_spec", lambda name: None)
    check_trackers(start_of("--mock-data"))
    with pytest.raises(ConfigError, match=r"pip install 'nanotrain\[prometheus\]'"):
        check_trackers(start)
    with pytest.raises(ConfigError, match="--trackers mlflow needs .* pip install mlflow,"):
        check_trackers(start_of("--mock-data", "--trackers", "mlflow"))


def test_an_unknown_tracker_is_named_with_those_that_exist() -> None:
    with pytest.raises(ConfigError, match="'mlflw': the known names are tensorboard, wandb"):
        check_trackers(start_of("--mock-data", "--trackers", "wandb", "mlflw"))


@pytest.mark.parametrize(
    ("kind", "installed", "layers", "packages"),
    [
        ("cuda", [], ["gated_delta_net"], ["flash-linear-attention"]),
        ("cuda", ["fla"], ["gated_delta_net"], []),
        ("cpu", [], ["gated_delta_net"], []),
        ("cuda", [], [], []),
        ("cuda", ["fla"], ["mamba2", "--mamba-num-groups", "1"], []),
        ("cuda", [], ["mamba2", "--mamba-num-groups", "1"], ["mamba-ssm"]),
    ],
)
def test_a_gpu_without_a_package_of_scans_says_so_in_one_line(
    kind, installed, layers, packages, monkeypatch, caplog
) -> None:
    monkeypatch.setattr(checks.device, "pick_device", lambda *_: torch.device(kind))
    monkeypatch.setattr(checks, "installed_packages", lambda: frozenset(installed))
    flags = ["--linear-attention-type", *layers] if layers else []
    check_linear_attention(start_of("--mock-data", *flags))
    found = [record.message for record in caplog.records if "pip install" in record.message]
    assert len(found) == len(packages)
    for message, package in zip(found, packages, strict=True):
        assert f"pip install {package}" in message


@pytest.mark.parametrize(
    ("flags", "kind", "message"),
    [
        (
            ["--memory-snapshot-path", "m.pickle"],
            "cpu",
            "m.pickle on a CPU: torch records",
        ),
        (
            ["--log-straggler"],
            "cuda",
            "--log-straggler on a GPU: the host does not wait for other ranks there",
        ),
    ],
)
def test_what_a_device_cannot_record_is_refused(monkeypatch, flags, kind, message) -> None:
    monkeypatch.setattr(checks.device, "pick_device", lambda *_: torch.device(kind))
    start = start_of("--mock-data", *flags)
    with pytest.raises(ConfigError, match=message):
        check_settings(start)
    check_settings(start_of("--mock-data"))


def test_a_missing_library_of_the_token_dispatcher_is_one_line(monkeypatch, caplog) -> None:
    experts = ["--mock-data", "--num-experts", "4", "--expert-model-parallel-size", "2", "--bf16"]
    flags = [*experts, "--moe-enable-deepep"]
    monkeypatch.setattr(checks, "has_deep_ep", lambda: True)
    check_token_dispatcher(start_of(*flags))
    monkeypatch.setattr(checks, "has_deep_ep", lambda: False)
    check_token_dispatcher(start_of(*experts))
    with pytest.raises(EnvironmentFault, match="package deep_ep is not installed: .* install"):
        check_token_dispatcher(start_of(*flags))
    check_token_dispatcher(start_of(*experts, "--moe-flex-dispatcher-backend", "hybridep"))
    assert "HybridEP is not called" in caplog.text


def test_kernels_that_send_tokens_are_refused_on_cpus() -> None:
    experts = ["--mock-data", "--num-experts", "4", "--expert-model-parallel-size", "2", "--bf16"]
    check_settings(start_of(*experts, "--device", "cpu"))
    with pytest.raises(ConfigError, match="deepep on CPUs: .* GPUs; .*dispatch 1"):
        check_settings(start_of(*experts, "--moe-enable-deepep", "--device", "cpu"))
