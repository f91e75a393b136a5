"""The GPU benchmark: its exit code without a GPU, its classes of kernels, and the command lines
that it launches.
"""

import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from nanotrain.attention.backends import installed_torch
from nanotrain.config.load import load
from nanotrain.plan.plan import plan_run


@pytest.fixture(scope="module")
def gpu() -> ModuleType:
    folder = str(Path(__file__).parents[2] / "benchmarks")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        known = set(sys.modules)
        import gpu as module  # type: ignore[import-not-found]

        yield module
        for name in ("gpu", "baselines", "cards", "model", "roofline", "throughput"):
            if name not in known:
                sys.modules.pop(name, None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_exits_with_2(
    gpu: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gpu.main([]) == 2
    assert "no GPU here" in capsys.readouterr().out


def test_kernels_are_summed_by_class(gpu: ModuleType) -> None:
    names = {
        "ncclDevKernel_ReduceScatter_Sum_f32": "communication",
        "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel": "attention",
        "nvjet_tst_128x256_64x4": "GEMM",
        "void at::native::multi_tensor_apply_kernel": "optimizer",
        "_softmax_gradient": "loss",
        "triton_poi_fused_mul_silu_0": "elementwise",
    }
    events = [{"cat": "kernel", "name": name, "dur": 2000.0} for name in names]
    events += [{"cat": "cpu_op", "name": "aten::mm", "dur": 9e9}, {"name": "no category"}]
    assert gpu.kernel_times(events, category="kernel") == dict.fromkeys(names.values(), 2.0)


def test_the_table_has_the_ratio_to_the_rival_and_the_utilization(gpu: ModuleType) -> None:
    speeds = {contender.name: 50.0 for contender in gpu.DENSE} | {"nanotrain": 100.0}
    outcomes = {name: [gpu.Outcome(speed, 1.0, 2**30, {})] for name, speed in speeds.items()}
    lines = gpu.table(gpu.DENSE, outcomes, flops=3, peak=1000.0).splitlines()
    assert "| nanotrain | 100 | 2.00x of torch | 30.0% | 1.0 GiB |" in lines
    assert "1.00x of torch, compiled, 1.00x of torch, compiled, loss too" in lines[-1]
    assert "| torch | 50 |  | 15.0% | 1.0 GiB |" in lines


@pytest.mark.parametrize(("name", "num_microbatches"), [("llama1b", 8), ("moe4", 1)])
def test_the_command_lines_of_nanotrain_load(
    gpu: ModuleType, name: str, num_microbatches: int, tmp_path: Path
) -> None:
    shape, contenders, _ = gpu.MODELS[name]
    job = gpu.Job(shape, "bf16", 1, 1, device="cpu", num_microbatches=num_microbatches)
    commands = [
        one.command(job, tmp_path) for one in contenders if one.name.startswith("nanotrain")
    ]
    for command in commands:
        config = load(command[1:]).config
        assert plan_run(config, 1, rank=0).num_microbatches == num_microbatches
        assert (config.model.moe and config.model.moe.num_experts) == (
            4 if name == "moe4" else None
        )


@pytest.mark.skipif(installed_torch() < (2, 11), reason="torch 2.10: as in test_roofline.py")
def test_the_budget_stands_beside_the_measurement(gpu: ModuleType) -> None:
    job = gpu.Job("smoke", "bf16", 1, 1, device="cpu")
    planned = gpu.budget_here(job, (), card="H100")
    assert planned.keys() == gpu.KERNELS.keys() and planned["communication"] == 0
    assert all(
        planned[name] > 0 for name in ("GEMM", "attention", "loss", "elementwise", "optimizer")
    )
    assert gpu.card_here("cpu") is None


def test_plain_torch_adds_the_gradients_of_microbatches_to_those_of_their_batch(
    gpu: ModuleType,
) -> None:
    baselines = sys.modules["baselines"]
    shape = replace(baselines.SHAPES["smoke"], layers=1)
    tokens = torch.arange(2 * 2 * 33).view(2, 2, 33) % shape.vocab
    weights = []
    for microbatches in ([*tokens], [tokens.flatten(0, 1)]):
        torch.manual_seed(0)
        stack = baselines.single(baselines.Llama(shape), torch.device("cpu"), False)
        loss = baselines.train_step(stack, microbatches)
        weights.append(torch.cat([weight.grad.flatten() for weight in stack.model.parameters()]))
        assert loss == pytest.approx(5.57, abs=0.1)
    torch.testing.assert_close(*weights, rtol=1e-4, atol=1e-7)


def test_what_does_not_fit_or_fails_is_named_with_the_command_for_it(
    gpu: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # start; begin and end of two launches; begin of a third
    seconds = iter([0.0, 0.0, 90.0, 90.0, 130.0, 150.0])
    monkeypatch.setattr(gpu.time, "monotonic", lambda: next(seconds))

    def fail(timeout_s: float) -> None:
        raise SystemExit("out of memory")

    rows = gpu.RowReport("headline", folder=None, machine="")
    launches = gpu.Launches(3.5, rows)
    assert launches.run("124m", "torch", lambda timeout_s: timeout_s) == 210.0
    assert launches.run("124m", "nanotrain", fail) is None
    assert launches.run("moe4", "profile", lambda timeout_s: 7) is None
    assert launches.report() == 1
    printed = capsys.readouterr().out
    assert "headline: 1 FAILED, 1 left out: 124m nanotrain" in printed
    assert (
        "left out, as the time was up: moe4 profile" in printed
        and "benchmarks/gpu.py --model moe4\n" in printed
    )
    assert "failed: 124m nanotrain" in printed and "benchmarks/gpu.py --model 124m\n" in printed
    assert (
        gpu.table(
            gpu.MIXTURE, {contender.name: [] for contender in gpu.MIXTURE}, flops=None, peak=None
        ).count("\n")
        == 1
    )


def test_a_launch_that_hangs_is_ended_and_a_failed_one_shows_the_end_of_its_output(
    gpu: ModuleType,
) -> None:
    finished = sys.modules[gpu.launch.__module__].finished
    hangs = "import time; print('x', flush=True); time.sleep(300)"
    with pytest.raises(SystemExit, match="torch had not ended after 1 s"):
        finished([sys.executable, "-c", hangs], {}, names="torch", timeout_s=1.0)
    fails = "import sys; [print(number) for number in range(99)]; sys.exit('no memory')"
    with pytest.raises(SystemExit) as error:
        finished([sys.executable, "-c", fails], {}, names="torch", timeout_s=None)
    assert str(error.value).splitlines() == ["torch failed:", *map(str, range(69, 99)), "no memory"]
    assert finished([sys.executable, "-c", "print(1)"], {}, names="torch", timeout_s=None) == "1\n"


def test_what_answers_most_is_launched_first(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[tuple[str, str]] = []
    monkeypatch.setattr(
        gpu.Launches, "run", lambda self, model, part, function: launched.append((model, part))
    )
    assert gpu.main(["--device", "cpu", "--model", "llama1b", "moe4", "--rounds", "1"]) == 0
    first, loss_too = (
        ("nanotrain, compiled, round 1", "profile"),
        "torch, compiled, loss too, round 1",
    )
    expected = [
        *(("llama1b", part) for part in (*first, loss_too)),
        *(("moe4", part) for part in first),
    ]
    assert launched[:5] == expected and launched[-1] == (
        "llama1b",
        "torch FSDP2, one rank, round 1",
    )
    assert sorted(
        part.removesuffix(", round 1") for model, part in launched if model == "llama1b"
    ) == sorted([contender.name for contender in gpu.MODELS["llama1b"][1]] + ["profile"])
