"""MLflow, which needs the package mlflow; mlflow-skinny is enough for a server."""

import re
from collections.abc import Iterator
from typing import Any

from nanotrain.config.schema import to_dict
from nanotrain.log import get_logger
from nanotrain.runs.files import write_text
from nanotrain.train.run import Run
from nanotrain.untrusted import MAX_NAME, read_file

log = get_logger(__name__)

MAX_PARAM = 500  # characters of a parameter, as older servers keep them


class MlflowTracker:
    """One run at MLflow for all starts of a run.

    MLflow's own variables choose where: MLFLOW_TRACKING_URI, else the database `mlflow/mlflow.db`
    of the run folder; MLFLOW_EXPERIMENT_NAME; MLFLOW_RUN_ID for the first start. Later starts take
    the id from `mlflow/run_id` of the run folder. The settings of the first start are the
    parameters, since MLflow does not change one. A repeated step has one more point.
    """

    def __init__(self, run: Run) -> None:
        import mlflow

        self._mlflow = mlflow
        folder = run.folder.path.resolve() / "mlflow"
        folder.mkdir(parents=True, exist_ok=True)
        if not mlflow.is_tracking_uri_set():
            mlflow.set_tracking_uri(f"sqlite:///{folder / 'mlflow.db'}")
        self._start(run)
        log.info("mlflow: run %s at %s", mlflow.active_run().info.run_id, mlflow.get_tracking_uri())

    def _start(self, run: Run) -> None:
        """Continue the run that the run folder names, or begin one and name it there."""
        path = run.folder.path / "mlflow" / "run_id"
        if path.is_file() and run.config.checkpoint.auto_resume:
            self._mlflow.start_run(run_id=read_file(path, most=MAX_NAME).decode().strip())
            return
        name = run.folder.path.resolve().name
        started = self._mlflow.start_run(run_name=name)
        self._mlflow.log_params(dict(_flat_settings(to_dict(run.config))))
        write_text(path, started.info.run_id)

    def write(self, step: int, values: dict[str, Any]) -> None:
        """Record the numbers of a step; lists are left out."""
        row: dict[str, float] = {}
        for name, value in values.items():
            if not isinstance(value, list):
                row[_allowed_name(name)] = float(value)
        self._mlflow.log_metrics(row, step=step)

    def close(self, *, failed: bool) -> None:
        self._mlflow.end_run("FAILED" if failed else "FINISHED")


def _flat_settings(section: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """The settings that are set, by dotted key."""
    for name, value in section.items():
        if isinstance(value, dict):
            yield from _flat_settings(value, f"{prefix}{name}.")
        elif value not in (None, []):
            yield prefix + _allowed_name(name), str(value)[:MAX_PARAM]


def _allowed_name(name: str) -> str:
    """A name of the characters that MLflow allows.

    >>> _allowed_name("loss/books=a,b")
    'loss/books_a_b'
    """
    return re.sub(r"[^\w\-. /]", "_", name)
