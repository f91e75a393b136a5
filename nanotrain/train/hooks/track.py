"""Metrics for other programs, on the first rank.

TrackHook    TensorBoard, Weights & Biases, and an endpoint for Prometheus with the newest numbers,
             as `nanotrain_NAME{run="..."}`; it needs the package prometheus_client:
             `pip install 'nanotrain[prometheus]'`. A run that is started again, also in another
             layout, continues its curves
NotifyHook   a webhook: JSON messages to `train.notify` at the start and end of a run, at its
             failure, and at loss spikes. Slack and Mattermost show `text`. A thread sends the
             messages, so a slow or unreachable server neither delays a step nor ends the run.

    {"event": "spike", "run": "llama", "step": 120, "train_iters": 600, "loss": 9.1,
     "text": "llama: step 120 of ..."}
"""

import json
import math
import netrc
import re
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue
from typing import Any, Protocol
from urllib.error import HTTPError
from urllib.parse import urlparse
from urllib.request import HTTPRedirectHandler, Request, build_opener

import numpy as np

from nanotrain.config.schema import to_dict
from nanotrain.log import get_logger
from nanotrain.quantities import count_of
from nanotrain.runs.files import write_text
from nanotrain.train.hooks.hook import Hook
from nanotrain.train.run import Run
from nanotrain.train.step_report import SPIKE, StepReport
from nanotrain.untrusted import MAX_NAME, read_file

log = get_logger(__name__)

TIMEOUT_S = 10.0  # timeout of one request of NotifyHook
LAST_WAIT_S = 5.0  # wait at the end of the run for messages that are not yet sent
QUIET_STEPS = 50  # steps without another message after a spike


class Tracker(Protocol):
    """An experiment tracker."""

    def write(self, step: int, values: dict[str, Any]) -> None:
        """Record the metrics of one step.

        Args:
            step: step of the training.
            values: numbers, and lists of numbers, such as the tokens of every expert.
        """

    def close(self, *, failed: bool) -> None:
        """Flush and close. `failed` if an error ended the run."""


class TensorBoardTracker:
    """Event files in `train.tensorboard_dir`, or in `tensorboard/` of the run folder.

    A start purges the steps that it is going to repeat from what TensorBoard shows of the files of
    earlier starts.
    """

    def __init__(self, run: Run) -> None:
        from torch.utils.tensorboard import SummaryWriter  # takes 2 s to import

        folder = run.config.train.tensorboard_dir or run.folder.path / "tensorboard"
        self._open = partial(SummaryWriter, str(folder))
        self._writer: Any = None  # opened by the first step, which is the first to purge

    def write(self, step: int, values: dict[str, Any]) -> None:
        if self._writer is None:
            self._writer = self._open(purge_step=step)
        for name, value in values.items():
            if isinstance(value, list):
                self._writer.add_histogram(name, np.array(value, dtype=float), step)
            else:
                self._writer.add_scalar(name, value, step)

    def close(self, *, failed: bool) -> None:
        if self._writer is not None:
            self._writer.close()


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


# trackers by the setting that enables them
TRACKERS: dict[str, Callable[[Run], Tracker]] = {
    "tensorboard": TensorBoardTracker,
    "wandb": WandbTracker,
    "prometheus_port": PrometheusTracker,
}


class TrackHook(Hook):
    """Writes the metrics of every step to the trackers that the `train` section enables.

    A tracker that fails is a warning and left out from then on: training does not depend on it.
    """

    def __init__(self) -> None:
        self._trackers: dict[str, Tracker] = {}

    def begin_writing(self, run: Run, *, step: int) -> None:
        if not run.context.control.is_first:
            return
        for name, make in TRACKERS.items():
            if getattr(run.config.train, name):
                with self._without_it(name):
                    self._trackers[name] = make(run)

    def after_rollback(self, run: Run, report: StepReport) -> None:
        """Start again at the step that the run went back to."""
        self.close(failed=False)
        self.begin_writing(run, step=run.state.step)

    def close(self, *, failed: bool) -> None:
        for name, tracker in list(self._trackers.items()):
            with self._without_it(name):
                tracker.close(failed=failed)

    def after_read(self, run: Run, report: StepReport) -> None:
        if not self._trackers:
            return
        values = _flat_metrics(report.to_json())
        for name, tracker in list(self._trackers.items()):
            with self._without_it(name):
                tracker.write(report.step, values)

    @contextmanager
    def _without_it(self, name: str) -> Iterator[None]:
        """Go on without a tracker that fails in the block, with whatever error of its package."""
        try:
            yield
        except Exception as error:
            self._trackers.pop(name, None)
            log.warning(
                "training goes on without %s, metrics.jsonl has every step: %s", name, error
            )


def _flat_metrics(fields: dict[str, Any]) -> dict[str, Any]:
    """The numbers of a row of metrics.jsonl by flat names, and the tokens per expert by router.

    >>> _flat_metrics({"step": 3, "loss": 2.0, "timers": {"data": 0.1}, "mtp_losses": [2.5]})
    {'loss': 2.0, 'mtp_1_loss': 2.5, 'timers/data': 0.1}
    """
    moe = fields.pop("moe", {})
    norms = fields.pop("norms", {})
    fields |= _prefixed("moe_", moe)
    for number, loss in enumerate(fields.pop("mtp_losses", []), start=1):
        fields[f"mtp_{number}_loss"] = loss
    fields |= _prefixed("loss/", fields.pop("source_losses", {}))
    fields |= fields.pop("evaluation", {})
    fields |= _prefixed("timers/", fields.pop("timers", {}))
    for kind, norm_by_group in norms.items():
        fields |= _prefixed(f"norms/{kind}/", norm_by_group)
    del fields["step"]
    values = {name: value for name, value in fields.items() if isinstance(value, int | float)}
    for router, counts in moe.get("load", {}).items():
        if counts:
            values[f"moe_load/{router}"] = counts
    return values


def _prefixed(prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{prefix}{name}": value for name, value in values.items()}


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


class _NoRedirect(HTTPRedirectHandler):
    """Refuses redirects, so that a message goes to the named server only."""

    def redirect_request(self, *args: Any) -> None:
        """Build no request."""


class Sender:
    """Sends messages to a URL, one after the other, in a separate thread.

    Args:
        url: http or https.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._has_failed = False
        self._waiting: SimpleQueue[dict[str, Any] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._send_all, name="notify", daemon=True)
        self._thread.start()

    def send(self, message: dict[str, Any]) -> None:
        """Hand a message to the thread."""
        self._waiting.put(message)

    def close(self, *, wait_s: float = LAST_WAIT_S) -> None:
        """Wait at most `wait_s` for messages that are not yet sent."""
        self._waiting.put(None)
        self._thread.join(wait_s)

    def _send_all(self) -> None:
        """Send queued messages until None is queued; a failure is a warning."""
        while (message := self._waiting.get()) is not None:
            body = json.dumps(message).encode()
            try:
                request = Request(
                    self._url, data=body, headers={"Content-Type": "application/json"}
                )
                with build_opener(_NoRedirect).open(request, timeout=TIMEOUT_S):
                    pass
            except HTTPError as error:
                self._warn(f"the server replied {error.code}")
            except Exception as error:  # any: a lost message must not end a run
                self._warn(type(error).__name__)  # its text may contain the URL

    def _warn(self, why: str) -> None:
        if not self._has_failed:
            log.warning(
                "--notify: a message was not delivered (%s); training goes on, this is logged once",
                why,
            )
        self._has_failed = True


class NotifyHook(Hook):
    """Sends the messages of a run, on the first rank."""

    def __init__(self) -> None:
        self._sender: Sender | None = None
        self._next_spike = 0  # the first step that may be one
        self._facts: dict[str, Any] = {}

    def before_training(self, run: Run) -> None:
        """Open the sender on the first rank, and notify that the run starts."""
        train = run.config.train
        if not run.context.control.is_first or train.notify is None:
            return
        self._sender = Sender(train.notify)
        self._facts = {
            "run": run.folder.path.resolve().name,
            "step": run.state.step,
            "train_iters": train.train_iters,
            "loss": None,
        }
        self._send("start", f"starts on {count_of(run.context.topology.world_size, 'rank')}")

    def after_read(self, run: Run, report: StepReport) -> None:
        if self._sender is None:
            return
        self._keep_facts(report)
        loss = report.output.loss
        is_spike = not math.isfinite(loss) or (report.loss_deviation or 0.0) >= SPIKE
        if is_spike and report.step >= self._next_spike:
            self._next_spike = report.step + QUIET_STEPS
            self._send("spike", f"the loss is {loss:.4g}")

    def _keep_facts(self, report: StepReport) -> None:
        loss = report.output.loss
        self._facts["step"] = report.step
        self._facts["loss"] = loss if math.isfinite(loss) else None

    def after_rollback(self, run: Run, report: StepReport) -> None:
        self._next_spike = 0  # the steps are counted from the checkpoint on
        self._keep_facts(report)
        self._send("spike", f"the loss is {report.output.loss:.4g}; back to step {run.state.step}")

    def after_training(self, run: Run) -> None:
        stopped = run.state.step < run.config.train.train_iters
        self._send("end", "stopped and saved" if stopped else "finished")

    def close(self, *, failed: bool) -> None:
        if failed:
            self._send("failure", "ended with an error")
        if self._sender is not None:
            self._sender.close()

    def _send(self, event: str, happened: str) -> None:
        if self._sender is None:
            return
        facts = self._facts
        text = f"{facts['run']}: step {facts['step']} of {facts['train_iters']}: {happened}"
        self._sender.send({"event": event, **facts, "text": text})
