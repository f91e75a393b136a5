"""An endpoint for Prometheus, which needs the package prometheus_client."""

import re
from typing import Any

from nanotrain.log import get_logger
from nanotrain.train.run import Run

log = get_logger(__name__)


class PrometheusTracker:
    """An HTTP endpoint with the newest numbers."""

    def __init__(self, run: Run) -> None:
        from prometheus_client import CollectorRegistry, Gauge, start_http_server

        train = run.config.train
        self._run_name = run.folder.path.resolve().name
        self._registry = CollectorRegistry()
        self._make_gauge = Gauge
        self._gauges = dict[str, Gauge]()
        self._server, _ = start_http_server(
            train.prometheus_port or 0, addr=train.prometheus_address, registry=self._registry
        )
        log.info(
            "metrics for Prometheus at http://%s:%d/metrics",
            train.prometheus_address,
            self._server.server_port,
        )

    def write(self, step: int, values: dict[str, Any]) -> None:
        self._set("step", step)
        for name, value in values.items():
            if not isinstance(value, list):
                self._set(name, value)

    def _set(self, name: str, value: float) -> None:
        if name not in self._gauges:
            self._gauges[name] = self._make_gauge(
                re.sub(r"\W", "_", f"nanotrain_{name}"),
                f"{name} of the newest step",
                ["run"],
                registry=self._registry,
            )
        self._gauges[name].labels(self._run_name).set(float(value))

    def close(self, *, failed: bool) -> None:
        self._server.shutdown()
        self._server.server_close()
