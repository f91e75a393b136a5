"""Weights & Biases."""

import netrc
import secrets
from typing import Any
from urllib.parse import urlparse

from nanotrain.config.schema import to_dict
from nanotrain.log import get_logger
from nanotrain.runs.files import write_text
from nanotrain.train.run import Run
from nanotrain.untrusted import MAX_NAME, read_file

log = get_logger(__name__)


class WandbTracker:
    """Weights & Biases; without an API key offline, in `wandb/` of the run folder.

    All starts of a run have one id, in `wandb/id` of the run folder; `WANDB_RUN_ID` overrides it.
    The x axis is `step`, the step of the training. wandb ignores rows that do not follow the last
    one, so its own counter also counts the rows of steps that were repeated.
    """

    def __init__(self, run: Run) -> None:
        import wandb

        self._histogram = wandb.Histogram
        self._num_repeated = _num_repeated_rows(run)
        settings = wandb.setup().settings
        has_key = bool(settings.api_key) or _netrc_has(urlparse(settings.base_url).hostname)
        train = run.config.train
        folder = run.folder.path
        self._run = wandb.init(
            id=settings.run_id or _wandb_id(run),
            resume="allow",
            project=train.wandb_project,
            entity=train.wandb_entity,
            name=train.wandb_exp_name or folder.resolve().name,
            dir=str(folder),
            config=to_dict(run.config),
            mode="offline" if settings.mode == "online" and not has_key else None,
            settings=wandb.Settings(silent=True),
        )
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")
        where = f"offline, in {folder / 'wandb'}" if self._run.offline else self._run.url
        log.info("wandb: %s", where)

    def write(self, step: int, values: dict[str, Any]) -> None:
        """Record the numbers of a step, and lists as histograms."""
        row: dict[str, Any] = {}
        for name, value in values.items():
            row[name] = self._histogram(value) if isinstance(value, list) else value
        row["step"] = step
        self._run.log(row, step=step + self._num_repeated)

    def close(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


def _num_repeated_rows(run: Run) -> int:
    """Rows of steps that were repeated; the log has set them aside before the trackers start."""
    path = run.folder.path / "metrics-superseded.jsonl"
    return len(path.read_bytes().splitlines()) if path.is_file() else 0


def _wandb_id(run: Run) -> str:
    """The id of the run at Weights & Biases, from its folder; a run begun anew has a new one."""
    path = run.folder.path / "wandb" / "id"
    if not (path.is_file() and run.config.checkpoint.auto_resume):
        path.parent.mkdir(exist_ok=True)
        write_text(path, secrets.token_hex(4))
    return read_file(path, most=MAX_NAME).decode()


def _netrc_has(host: str | None) -> bool:
    """Whether the netrc file of the user has a login for a host."""
    try:
        return host is not None and netrc.netrc().authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
