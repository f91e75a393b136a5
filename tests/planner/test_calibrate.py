"""Calibration: runs that were measured are predicted, planted slowdowns found, and another layout
keeps them.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from nanotrain.config.load import to_yaml
from nanotrain.errors import ConfigError
from nanotrain.planner.calibrate import Measured, calibrate, calibrated, measured
from nanotrain.planner.hardware import Calibration, gpu_of
from nanotrain.planner.scenario import Scenario
from nanotrain.planner.step_time import predict_step
from tests.planner.scenarios import llama

SLOW = Calibration(compute=1.3, network=2.5)


def run_on(machine: Calibration, scenario: Scenario, *, has_timers: bool = False) -> Measured:
    time = predict_step(calibrated(scenario, machine))
    return Measured(scenario, time.total, time.exposed["dp"] if has_timers else 0.0)


def run_folder(folder: Path, scenario: Scenario, times: list[float], **more: object) -> Path:
    rows = [
        {"step": step, "step_time_s": seconds} | more for step, seconds in enumerate(times, start=1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "starts.jsonl").write_text(
        json.dumps({"step": 0, "world_size": scenario.world_size}) + "\n"
    )
    (folder / "config.yaml").write_text(to_yaml(scenario.config))
    return folder


def test_one_run_is_predicted_and_its_factor_recovered() -> None:
    found = calibrate([run_on(Calibration(compute=1.3), llama(8, gbs=64))])
    assert found.compute == pytest.approx(1.3, rel=1e-3) and found.network == 1.0
    again = run_on(Calibration(compute=0.7, network=0.9), llama(64, gbs=256, tp=4))
    time = predict_step(calibrated(again.scenario, calibrate([again])))
    assert time.total == pytest.approx(again.step_s, rel=0.03)


def test_timers_or_a_second_run_tell_collectives_apart_and_another_layout_keeps_both() -> None:
    plain, split = llama(64, gbs=128), llama(64, gbs=128, tp=8)
    for runs in (
        [run_on(SLOW, plain, has_timers=True)],
        [run_on(SLOW, each) for each in (plain, split)],
    ):
        found = calibrate(runs)
        assert (found.compute, found.network) == pytest.approx(
            (SLOW.compute, SLOW.network), rel=0.02
        )
        other = llama(128, gbs=256, pp=4, mbs=2)
        time, truth = (predict_step(calibrated(other, each)) for each in (found, SLOW))
        assert time.total == pytest.approx(truth.total, rel=0.01)


def test_utilization_stays_relative_to_the_data_sheet() -> None:
    scenario = llama(8, gbs=64)
    fast, slow = (
        predict_step(calibrated(scenario, each))
        for each in (Calibration(), Calibration(compute=2.0))
    )
    assert slow.mfu == pytest.approx(fast.mfu * fast.total / slow.total)
    assert slow.compute > 1.9 * fast.compute


def test_a_run_folder_has_its_ranks_and_the_median_of_its_steady_steps(tmp_path: Path) -> None:
    scenario = llama(8, gbs=64, engine="nanotrain")
    timers = {"grad-reduce": 0.25, "param-gather": 0.5, "forward-backward": 3.0}
    folder = run_folder(tmp_path, scenario, [90.0, 9.0, 8.0, 5.0, 4.0, 6.0, 4.5], timers=timers)
    run = measured(folder, gpu=gpu_of("h100"))
    assert (run.step_s, run.exposed_dp_s) == (4.75, 0.75)
    assert run.scenario == replace(scenario)


def test_a_folder_without_steps_and_an_impossible_time_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no measured steps"):
        measured(tmp_path, gpu=gpu_of("h100"))
    scenario = llama(512, gbs=512, tp=8)
    with pytest.raises(ConfigError, match="communication alone is predicted to take"):
        calibrate([Measured(scenario, 1e-3)])


def test_a_core_computes_and_launches_in_turn() -> None:
    small = {"hidden_size": 256, "num_attention_heads": 8, "ffn_hidden_size": 768, "num_layers": 8}
    small |= {
        "vocab_size": 4096,
        "seq_length": 256,
        "max_position_embeddings": 256,
        "engine": "nanotrain",
    }
    one, two, reduced = (
        predict_step(llama(ranks, gpu="cpu", gbs=8, mbs=4, **small, bf16=is_bf16))
        for ranks, is_bf16 in ((1, None), (2, None), (1, True))
    )
    assert one.host > 0 and two.exposed["dp"] > 0
    assert two.total < one.total < 2 * two.total
    assert reduced.compute < 0.8 * one.compute
