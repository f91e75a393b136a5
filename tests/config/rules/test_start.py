"""Rules before a start: each device names the settings of the other."""

import pytest

from nanotrain.config.rules.check import check_rules
from nanotrain.errors import ErrorCollector
from tests.config.asking import config_of


def errors_of(kind: str, settings: dict) -> list[str]:
    """The errors of a group of rules."""
    errors = ErrorCollector()
    check_rules(config_of(**settings), kind, errors=errors)
    return [str(error) for error in errors.errors]


@pytest.mark.parametrize(
    ("settings", "flag"),
    [
        ({"cuda_graph_impl": "local"}, "--cuda-graph-impl local"),
        ({"optimizer_cpu_offload": True}, "--optimizer-cpu-offload"),
        ({"memory_snapshot_path": "x"}, "--memory-snapshot-path x"),
        (
            {"moe_flex_dispatcher_backend": "deepep", "expert_model_parallel_size": 2},
            "--moe-flex-dispatcher-backend deepep",
        ),
    ],
)
def test_settings_of_gpus_are_refused_on_a_cpu(settings: dict, flag: str) -> None:
    (error,) = errors_of("cpu", settings)
    assert flag in error and errors_of("cuda", settings) == []


def test_settings_of_cpus_are_refused_on_a_gpu() -> None:
    (error,) = errors_of("cuda", {"log_straggler": True})
    assert error.startswith("--log-straggler on a GPU")
    assert errors_of("cpu", {"log_straggler": True}) == []


def test_a_run_needs_data() -> None:
    (error,) = errors_of("start", {})
    assert "no corpus" in error
    assert errors_of("start", {"mock_data": True}) == []
