"""The run folder: paths of everything a run writes.

runs/<name>/
  config.yaml        the resolved configuration, itself a valid input
  environment.json   versions, git revision, machine, command line
  starts.jsonl       a JSON row per start of the run: step, time, ranks, changed settings
  metrics.jsonl      one JSON object per step; metrics-superseded.jsonl has rows of repeated steps
  data-order.jsonl   settings of the sample order, per start and rollback (`nanotrain data`)
  relayout.jsonl     layouts after `nanotrain relayout`, by the step after which they begin
  data-mix.jsonl     stages after `nanotrain data mix`, by the step that they begin with
  hang-report.txt    which rank the others waited for; hang-report.json for programs
  failures/          the error that ended a rank, by rank
  restarts.jsonl     restarts in place: the fault, the ranks that go on, and where the seconds went
  verdicts.jsonl     what to do after each failure (`nanotrain verdict`)
  samples.jsonl      texts generated at the end of training: {"step", "text"}
  report.html        the report of the run
  run.lock           held by the job that trains in the folder
  checkpoints/       step-00000100/ ...
  averages/          step-00000100/, the mean of the last checkpoints, if asked for
  tokenizer/         all files of the tokenizer
  data/              the quick-start corpus, if it is used
  imported/          checkpoints of Megatron-LM from which the run began
  profile/, tensorboard/, wandb/   if enabled
"""

import errno
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import yaml

from nanotrain.config.config import Config
from nanotrain.config.schema import unnest
from nanotrain.errors import EnvironmentFault
from nanotrain.runs.files import disk_errors, open_append, reason, write_all, write_text
from nanotrain.runs.lock import LOCK_NAME
from nanotrain.storage.remote import Remote, is_address, parse
from nanotrain.system import package_version
from nanotrain.untrusted import object_of, parse_json, read_file

_PROBE = b"this process can write here"
_FIX = "choose another folder with --run-dir, or free space"
_MARKS = (LOCK_NAME, "checkpoints")  # a folder with one of them is a run's
# Replaced or appended to by a run.
_ROWS = (
    "metrics.jsonl",
    "metrics-superseded.jsonl",
    "samples.jsonl",
    "starts.jsonl",
    "data-order.jsonl",
)
_WRITTEN = ("config.yaml", "environment.json", "report.html", *_ROWS)
REPORTED_PACKAGES = (
    "nanotrain",
    "torch",
    "transformers",
    "datasets",
    "tokenizers",
    "safetensors",
    "numpy",
)


class RunFolder:
    """The paths of a run.

    Args:
        path: the local folder.
        remote: its address in object storage; None: it has none.
    """

    def __init__(self, path: Path, remote: Remote | None = None) -> None:
        self.path, self.remote = path, remote
        self.checkpoints = path / "checkpoints"
        self.metrics = path / "metrics.jsonl"
        self.samples = path / "samples.jsonl"
        self.report = path / "report.html"
        self.data = path / "data"
        self.tokenizer = path / "tokenizer"

    @classmethod
    def of(cls, config: Config) -> "RunFolder":
        """The folder of a run.

        For a run in object storage it lies below `staging_dir`, under bucket and name.
        """
        run_dir = str(config.train.run_dir)
        staging = Path(config.checkpoint.staging_dir or "runs")
        if not is_address(run_dir):
            return cls(Path(run_dir))
        remote = within_timeout(parse(run_dir), config)
        return cls(staging / remote.path, remote)

    def check_writable(self, *, probes: bool = True) -> None:
        """Check that this folder and its folder of checkpoints can be written; leaves nothing.

        `probes` is as for the function.

        Raises:
            EnvironmentFault: one of them cannot be created or written.
        """
        check_writable(self.path, name="the run folder", fix=_FIX, probes=probes)
        if os.path.lexists(self.checkpoints):
            check_writable(self.checkpoints, name="the checkpoint folder", fix=_FIX, probes=probes)

    def require_writable(self, *, probes: bool = True) -> None:
        """Create the folder, after the checks of `check_writable`.

        Raises:
            EnvironmentFault: it cannot be created or written.
        """
        self.check_writable(probes=probes)
        with disk_errors(self.path, fix=_FIX):
            self.path.mkdir(parents=True, exist_ok=True)

    def require_own(self) -> None:
        """Check that the run replaces no foreign file.

        Raises:
            EnvironmentFault: a folder without a run has a file with a name that the run writes.
        """
        if any(os.path.lexists(self.path / name) for name in _MARKS):
            return
        for name in _WRITTEN:
            if os.path.lexists(self.path / name):
                raise EnvironmentFault(
                    f"{self.path / name} exists and was not written by nanotrain",
                    why=f"the run would replace it; a run's folder has {' or '.join(_MARKS)}",
                    fix="choose another folder with --run-dir, or move the file",
                )

    def add_start(
        self,
        config_yaml: str,
        *,
        step: int,
        world_size: int,
        origins: Mapping[str, str] | None = None,
        in_place: bool = False,
    ) -> None:
        """Append a line to starts.jsonl.

        Call it before `write_description`, which replaces the settings of the last start.

        Args:
            config_yaml: the text of config.yaml.
            step: number of the newest step.
            world_size: number of ranks.
            origins: key -> source of its value; values that nobody set at this start or at the last
                one are no changed settings.
            in_place: whether the processes went on, from the state in their memory.

        Raises:
            EnvironmentFault: the disk is full or the folder cannot be written.
        """
        before: dict[str, Any] = {}
        # the first start, or a damaged file
        with suppress(OSError, ValueError, RecursionError, yaml.YAMLError):
            before = unnest(yaml.safe_load(read_file(self.path / "config.yaml")))
        settings = unnest(yaml.safe_load(config_yaml)) if before else {}
        unset = _unset_settings(origins or {}) & (
            _unset_settings(self._origins()) | (settings.keys() - before.keys())
        )
        changed = {}
        for key, value in settings.items():
            if value != before.get(key) and key not in unset:
                changed[key] = (before.get(key), value)
        row = {"step": step, "time_s": time.time(), "world_size": world_size, "changed": changed}
        if in_place:
            row["in_place"] = True
        with (
            open_append(self.path / "starts.jsonl") as file,
            disk_errors(self.path / "starts.jsonl"),
        ):
            write_all(file, json.dumps(row, default=str).encode() + b"\n")

    def _origins(self) -> dict[str, Any]:
        """The sources of the settings of the last start; empty if unknown."""
        with suppress(OSError, ValueError):
            environment = object_of(parse_json(read_file(self.path / "environment.json")), "it")
            return object_of(environment.get("origins"), "origins")
        return {}

    def write_description(
        self, config_yaml: str, facts: Mapping[str, Any], *, secret: str | None = None
    ) -> None:
        """Write config.yaml, and environment.json with `facts` of the live run.

        Such facts are the device and the world size.

        Args:
            config_yaml: the text of config.yaml.
            facts: further entries of environment.json.
            secret: text that is hidden in the command line.

        Raises:
            EnvironmentFault: the disk is full or the folder cannot be written.
        """
        write_text(self.path / "config.yaml", config_yaml)
        environment = {
            "command": [word.replace(secret, "(hidden)") if secret else word for word in sys.argv],
            "python": platform.python_version(),
            "platform": platform.platform(),
            "host": platform.node(),
            "packages": {name: package_version(name) for name in REPORTED_PACKAGES},
            "git_revision": _git_revision(),
            **facts,
        }
        write_text(self.path / "environment.json", json.dumps(environment, indent=2) + "\n")


def within_timeout(remote: Remote, config: Config) -> Remote:
    """An address whose requests end before the other ranks of a run stop waiting for this one."""
    timeout_s = 60 * config.parallel.distributed_timeout_minutes
    return replace(remote, timeout_s=min(remote.timeout_s, timeout_s))


def _unset_settings(origins: Mapping[str, Any]) -> set[str]:
    """The settings that nobody set: their values are defaults, or follow from other settings."""
    return {key for key, origin in origins.items() if str(origin).startswith("default")}


def check_writable(path: Path, *, name: str, fix: str, probes: bool = True) -> None:
    """Check that a folder can be written or created; nothing is left behind.

    It is created in the nearest folder that exists.

    Args:
        path: the folder.
        name: description of the folder, for the error.
        fix: the cure where the folder cannot be written.
        probes: write a file, which also finds a full disk; else only permissions are asked for, as
            by all ranks of a machine but one: a file system that many share takes seconds for a
            file of each rank.

    Raises:
        EnvironmentFault: it cannot be created or written.
    """
    existing = next(
        folder for folder in (path, *path.absolute().parents) if os.path.lexists(folder)
    )
    try:
        if not probes:
            code = errno.EACCES if existing.is_dir() else errno.ENOTDIR
            if code == errno.ENOTDIR or not os.access(existing, os.W_OK | os.X_OK):
                raise OSError(code, os.strerror(code))
            return
        # a name that no other rank has
        with NamedTemporaryFile(dir=existing, prefix=".writable-") as probe:
            probe.write(_PROBE)  # on a full disk an empty file can still be created
            probe.flush()
    except OSError as error:
        why = reason(error, path, needed=len(_PROBE))
        raise EnvironmentFault(f"{name} {path} cannot be written", why=why, fix=fix) from None


def _git_revision() -> str | None:
    """The git revision of the source tree; None for an installed package."""
    tree = Path(__file__).parents[2]
    if not (tree / ".git").exists():  # another project's tree may hold the installed package
        return None
    command = ["git", "-C", str(tree), "describe", "--always", "--dirty", "--abbrev=40"]
    with suppress(OSError, subprocess.TimeoutExpired):
        return (
            subprocess.run(
                command, capture_output=True, text=True, timeout=10, check=False
            ).stdout.strip()
            or None
        )
    return None
