"""An endpoint for Prometheus on the first rank: every number of metrics.jsonl, as `nanotrain_NAME{run="..."}`.

Needs the package prometheus_client: `pip install 'nanotrain[prometheus]'`.
"""

from typing import Any

from nanotrain.log import get_logger
from nanotrain.train.hooks.hook import Hook
from nanotrain.train.metrics.step_report import StepReport, UnreadReports
from nanotrain.train.run import Run

log = get_logger(__name__)
PACKAGE = "prometheus_client"


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
