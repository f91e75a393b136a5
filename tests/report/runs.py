"""Run folders for tests, written as a run would write them."""

import json
from pathlib import Path
from typing import Any

import yaml


def write_run(
    folder: Path, *, steps: int = 40, config: dict[str, Any] | None = None, **metrics: Any
) -> Path:
    """A run folder of `steps` steps; `metrics` are functions of the step that replace or add a
    metric.
    """
    folder.mkdir(parents=True)
    sections = {"train": {"train_iters": 40, "seed": 1}, "parallel": {}, "optim": {"lr": 0.1}}
    (folder / "config.yaml").write_text(yaml.safe_dump(config or sections))
    environment = {
        "command": ["train", "<b>"],
        "packages": {"torch": "2.13.0"},
        "world_size": 4,
        "memory": {"params": 10**9, "grads": 2 * 10**9},
        "origins": {"optim.lr": "arguments", "train.seed": "default"},
    }
    (folder / "environment.json").write_text(json.dumps(environment))
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            row: dict[str, Any] = {
                "step": step,
                "loss": 8.0 / step,
                "grad_norm": 1.0,
                "lr": 0.1,
                "step_time_s": 36.0,
                "tokens_per_second": 100.0,
                "mfu": None,
                "peak_memory_bytes": 10**9,
                "consumed_tokens": step * 64,
                "skipped": False,
                "loss_scale": 1.0,
            }
            file.write(
                json.dumps(row | {name: value(step) for name, value in metrics.items()}) + "\n"
            )
    return folder


def expert_load(step: int) -> dict[str, Any]:
    """Router metrics of a model with two routers of three experts."""
    load = {"layers.0": [step, 2 * step, 3 * step], "layers.1": [6 * step, 0, 0]}
    return {
        "load": load,
        "max_load": 2.0,
        "dropped": 0.0,
        "entropy": 1.0,
        "balance_loss": 1.0,
        "z_loss": 0.1,
    }
