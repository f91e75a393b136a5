"""Metrics for other programs, on the first rank.

TrackHook        experiment trackers: TensorBoard and Weights & Biases
PrometheusHook   an endpoint with every number of metrics.jsonl, as `nanotrain_NAME{run="..."}`; it needs the package
                 prometheus_client: `pip install 'nanotrain[prometheus]'`
"""

import netrc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol
from urllib.parse import urlparse

import numpy as np

from nanotrain.config.schema import to_dict
from nanotrain.log import get_logger
from nanotrain.train.hooks.hook import Hook
from nanotrain.train.run import Run
from nanotrain.train.step_report import StepReport, UnreadReports

log = get_logger(__name__)


class Tracker(Protocol):
    """An experiment tracker."""

    def write(self, step: int, values: dict[str, Any]) -> None:
        """Record the metrics of one step: numbers, and lists of numbers, such as the tokens of every expert."""

    def close(self, *, failed: bool) -> None:
        """Flush and close. `failed` if an error ended the run."""


class TensorBoardTracker:
    """Event files in `train.tensorboard_dir`, or in `tensorboard/` of the run folder."""

    def __init__(self, run: Run) -> None:
        from torch.utils.tensorboard import SummaryWriter  # takes 2 s to import

        folder = run.config.train.tensorboard_dir or run.folder.path / "tensorboard"
        self._thread_hook = threading.excepthook
        threading.excepthook = self._on_thread_error
        self._writer = SummaryWriter(str(folder), purge_step=run.state.step + 1)

    def _on_thread_error(self, error: threading.ExceptHookArgs) -> None:
        """Print no traceback of TensorBoard's writing thread, which ends: the next write raises its error again."""
        if type(error.thread).__module__.startswith("tensorboard."):
            threading.excepthook = self._thread_hook
        else:
            self._thread_hook(error)

    def write(self, step: int, values: dict[str, Any]) -> None:
        for name, value in values.items():
            if isinstance(value, list):
                self._writer.add_histogram(name, np.array(value, dtype=float), step)
            else:
                self._writer.add_scalar(name, value, step)

    def close(self, *, failed: bool) -> None:
        try:
            self._writer.close()
        finally:
            threading.excepthook = self._thread_hook


class WandbTracker:
    """Weights & Biases; without an API key offline, in `wandb/` of the run folder."""

    def __init__(self, run: Run) -> None:
        import wandb

        self._histogram = wandb.Histogram
        settings = wandb.setup().settings
        has_key = bool(settings.api_key) or _netrc_has(urlparse(settings.base_url).hostname)
        self._run = wandb.init(
            project=run.config.train.wandb_project,
            entity=run.config.train.wandb_entity,
            name=run.config.train.wandb_exp_name or run.folder.path.resolve().name,
            dir=str(run.folder.path),
            config=to_dict(run.config),
            mode="offline" if settings.mode == "online" and not has_key else None,
            settings=wandb.Settings(silent=True),
        )
        log.info("wandb: %s", f"offline, in {run.folder.path / 'wandb'}" if self._run.offline else self._run.url)

    def write(self, step: int, values: dict[str, Any]) -> None:
        lists = {name: self._histogram(value) for name, value in values.items() if isinstance(value, list)}
        self._run.log(values | lists, step=step)

    def close(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


TRACKERS: dict[str, Callable[[Run], Tracker]] = {"tensorboard": TensorBoardTracker, "wandb": WandbTracker}


class TrackHook(Hook):
    """Writes the metrics of every step to the trackers enabled by `train.tensorboard` and `train.wandb`.

    A tracker that fails is a warning and left out from then on: training does not depend on it.
    """

    def __init__(self) -> None:
        self._trackers: dict[str, Tracker] = {}
        self._unread = UnreadReports()

    def before_training(self, run: Run) -> None:
        if run.context.control.is_first:
            for name, make in TRACKERS.items():
                if getattr(run.config.train, name):
                    with self._without_it(name):
                        self._trackers[name] = make(run)

    def after_step(self, run: Run, report: StepReport) -> None:
        if self._trackers:
            self._write(self._unread.take(report))

    def after_training(self, run: Run) -> None:
        self._write(self._unread.take_all())

    def after_failure(self, run: Run) -> None:
        self._write(self._unread.take_all())

    def close(self, *, failed: bool) -> None:
        self._write(self._unread.take_ready())
        for name, tracker in list(self._trackers.items()):
            with self._without_it(name):
                tracker.close(failed=failed)

    def _write(self, reports: list[StepReport]) -> None:
        for report in reports:
            self._write_one(report)

    def _write_one(self, report: StepReport) -> None:
        fields = report.to_json()
        moe, norms = fields.pop("moe", {}), fields.pop("norms", {})
        fields |= {f"moe_{name}": value for name, value in moe.items()}
        fields |= {f"mtp_{number}_loss": loss for number, loss in enumerate(fields.pop("mtp_losses", []), start=1)}
        fields |= {f"loss/{name}": loss for name, loss in fields.pop("source_losses", {}).items()}
        fields |= {f"norms/{kind}/{group}": norm for kind, each in norms.items() for group, norm in each.items()}
        values = {name: value for name, value in fields.items() if name != "step" and isinstance(value, int | float)}
        values |= {f"moe_load/{router}": counts for router, counts in moe.get("load", {}).items() if counts}
        for name, tracker in list(self._trackers.items()):
            with self._without_it(name):
                tracker.write(report.step, values)

    @contextmanager
    def _without_it(self, name: str) -> Iterator[None]:
        """Go on without a tracker that fails in the block; its packages raise errors of many types."""
        try:
            yield
        except Exception as error:
            self._trackers.pop(name, None)
            log.warning("training goes on without %s, metrics.jsonl has every step: %s", name, error)


def _netrc_has(host: str | None) -> bool:
    """Whether the netrc file of the user has a login for a host."""
    try:
        return host is not None and netrc.netrc().authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


class PrometheusHook(Hook):
    """Serves the newest metrics. A port that is taken is a warning: training does not depend on it."""

    def __init__(self) -> None:
        self._gauges: dict[str, Any] = {}
        self._server: Any = None
        self._unread = UnreadReports()

    def before_training(self, run: Run) -> None:
        if not run.context.control.is_first:
            return
        from prometheus_client import CollectorRegistry, start_http_server

        train = run.config.train
        self._registry, self._run = CollectorRegistry(), run.folder.path.resolve().name
        address = f"{train.prometheus_address}:{train.prometheus_port}"
        try:
            self._server, _ = start_http_server(
                train.prometheus_port or 0, addr=train.prometheus_address, registry=self._registry
            )
        except OSError as error:
            log.warning("no Prometheus endpoint at %s: %s", address, error.strerror or error)
            return
        log.info("metrics for Prometheus at http://%s/metrics", address)

    def after_step(self, run: Run, report: StepReport) -> None:
        if self._server is None:
            return
        for readable in self._unread.take(report)[-1:]:
            self._show(readable)

    def _show(self, report: StepReport) -> None:
        from prometheus_client import Gauge

        fields = report.to_json()
        fields |= {f"moe_{name}": value for name, value in fields.pop("moe", {}).items()}
        for kind, norms in fields.pop("norms", {}).items():
            fields |= {f"norms_{kind}_{group}": norm for group, norm in norms.items()}
        for name, value in fields.items():
            if not isinstance(value, int | float):
                continue
            if name not in self._gauges:
                meaning = f"{name} of the newest step"
                self._gauges[name] = Gauge(f"nanotrain_{name}", meaning, ["run"], registry=self._registry)
            self._gauges[name].labels(self._run).set(float(value))

    def close(self, *, failed: bool) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
