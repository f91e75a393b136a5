"""The run folder: paths of everything a run writes.

runs/<name>/
  config.yaml        the resolved configuration, itself a valid input
  environment.json   versions, git revision, machine, command line
  metrics.jsonl      one JSON object per step
  checkpoints/       step-00000100/ ...
  data/              the quick-start corpus, if it is used
  profile/, tensorboard/, wandb/   if enabled
"""

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanotrain.errors import EnvironmentFault

REPORTED_PACKAGES = ("nanotrain", "torch", "transformers", "datasets", "tokenizers", "safetensors", "numpy")


@dataclass(frozen=True)
class RunFolder:
    """The paths of a run."""

    path: Path

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def data(self) -> Path:
        return self.path / "data"

    def require_writable(self) -> None:
        """Create the folder and check that it can be written.

        Raises:
            EnvironmentFault: it cannot be created or written.
        """
        probe = self.path / f".writable-{platform.node()}-{os.getpid()}"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            probe.write_text("this process can write here")  # on a full disk an empty file can still be created
            probe.unlink()
        except OSError as error:
            raise EnvironmentFault(
                f"the run folder {self.path} cannot be written",
                why=error.strerror or str(error),
                fix="choose another folder with train.run_dir, or free space",
            ) from error

    def write_description(self, config_yaml: str, facts: Mapping[str, Any]) -> None:
        """Write config.yaml, and environment.json with `facts` of the live run (device, world size)."""
        (self.path / "config.yaml").write_text(config_yaml, encoding="utf-8")
        environment = {
            "command": sys.argv,
            "python": platform.python_version(),
            "platform": platform.platform(),
            "packages": {name: _version(name) for name in REPORTED_PACKAGES},
            "git_revision": _git_revision(),
            **facts,
        }
        (self.path / "environment.json").write_text(json.dumps(environment, indent=2) + "\n", encoding="utf-8")

    def drop_metrics_after(self, step: int) -> None:
        """Drop the metrics of steps after `step`, which will be repeated."""
        if not self.metrics.exists():
            return
        lines = self.metrics.read_text(encoding="utf-8").splitlines()
        kept = [line for line in lines if _step_of(line) <= step]
        if len(kept) < len(lines):
            replacement = self.metrics.with_suffix(".tmp")
            replacement.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
            replacement.replace(self.metrics)


def _step_of(line: str) -> float:
    """The step of a line of metrics.jsonl; infinite for a line truncated by a crash."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git_revision() -> str | None:
    """The git revision of the source tree; None for an installed package."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
