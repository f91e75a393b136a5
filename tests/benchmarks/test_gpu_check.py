"""The first check of a GPU machine: rows, the kernels that it measures, and slices of recipes."""

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from nanotrain.attention.sdpa import restricted
from nanotrain.config.load import load
from nanotrain.plan.plan import plan_run

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SCRIPT = Path(__file__).parents[2] / "scripts" / "gpu_check"


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        import gpu_kernels

        return gpu_kernels


@pytest.fixture(scope="module")
def slices() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        import gpu_slices

        return gpu_slices


def test_attention_may_be_restricted_to_each_of_its_kernels(kernels: ModuleType) -> None:
    assert [len(allowed) for allowed in kernels.SDPA_KERNELS] == [0, 1, 1]
    for allowed in kernels.SDPA_KERNELS:
        with restricted(allowed):
            allows_math = torch.backends.cuda.math_sdp_enabled()
        assert allows_math == (not allowed)


def raises() -> None:
    raise RuntimeError("no kernel image\nmore")


@pytest.mark.parametrize(
    ("run", "error", "state"),
    [
        (list, 0.01, "ok"),
        (list, 0.02, "WRONG"),
        (list, float("inf"), "WRONG"),
        (raises, 0.0, "FAILED"),
    ],
)
def test_a_kernel_is_right_wrong_or_failed(
    kernels: ModuleType, run, error: float, state: str
) -> None:
    measurement = kernels.Measurement("name", run, flops=1e9, error=lambda: error, bound=0.01)
    row = kernels.measure(measurement, "cpu")
    assert row.state == state
    if state == "FAILED":
        assert row.figures == "RuntimeError: no kernel image"


def test_values_that_are_nan_are_wrong(kernels: ModuleType) -> None:
    assert kernels.relative_error(torch.tensor([torch.nan]), torch.ones(1)) == float("inf")


def test_a_maker_that_raises_leaves_the_other_makers_of_its_group(
    kernels: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def good(machine):
        yield kernels.Measurement("good", list)

    def bad(machine):
        raise RuntimeError("no such operator")
        yield

    monkeypatch.setitem(kernels.GROUPS, "host", (bad, good))
    rows = list(kernels.run_group("host", kernels.Machine("cpu", scale=64)))
    assert [(row.name, row.state) for row in rows] == [("host: bad", "FAILED"), ("good", "ok")]


def test_the_summary_after_each_row_names_what_is_bad(
    kernels: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = kernels.RowReport("kernels", folder=tmp_path, machine="a card")
    for number, state in enumerate(["ok", "WRONG", "ok"]):
        report.add(kernels.Row(f"row {number}", state, "a|b"))
    assert capsys.readouterr().out.splitlines()[-1] == "    kernels: 2 ok, 1 WRONG: row 1"
    written = (tmp_path / "kernels.md").read_text()
    assert written.startswith("# kernels\n\na card\n")
    assert "| row 1 | WRONG | a\\|b |" in written
    assert report.exit_code == 1


def test_the_references_of_experts_have_all_tokens(kernels: ModuleType) -> None:
    from gpu_products import expert_case

    case = expert_case(kernels.Machine("cpu", scale=64))
    assert sum(case.counts) == len(case.x) == case.offs[-1]
    assert min(case.counts) == 0
    assert case.outputs().shape == case.grad.shape
    assert not case.weight_gradients()[case.counts.index(0)].any()


@pytest.mark.parametrize("which", ["recipes", "fp8"])
def test_the_command_lines_of_slices_load_at_both_sizes(slices: ModuleType, which: str) -> None:
    for name, flags in slices.SLICES[which].items():
        for sizes in ((), slices.tiny_sizes(name)):
            config = load([*flags, *slices.COMMON, *sizes]).config
            assert plan_run(config, 1, rank=0).num_microbatches >= 2, name


def test_a_slice_is_predicted_by_the_planner(slices: ModuleType) -> None:
    flags = [*slices.RECIPES["qwen3_30b_a3b"], *slices.COMMON]
    prediction = slices.plan_slice(flags, "NVIDIA H200")  # as the driver names it
    assert 1e3 < prediction.tokens_per_second < 1e6
    assert 1e9 < prediction.memory_bytes < 141e9
    with pytest.raises(RuntimeError, match="error: "):
        slices.plan_slice([*flags, "--num-layers=0"], "h200")


def test_a_trace_shows_its_kernels_by_class(slices: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "profile").mkdir()
    event = '{"cat": "kernel", "name": "nvjet_tst_128", "dur": 2000.0}'
    (tmp_path / "profile/step.json").write_text(f'{{"traceEvents": [{event}, {event}]}}')
    assert slices.kernel_lines(tmp_path, "kernel") == [
        "    2 kernels, ms by class: GEMM 4.0",
        "         4.00 ms      2 x nvjet_tst_128",
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_check_says_what_the_machine_has_and_ends_with_2() -> None:
    result = subprocess.run(
        [sys.executable, str(SCRIPT), "kernels"], capture_output=True, text=True, check=False
    )
    assert result.returncode == 2
    assert "no GPU" in result.stdout
