"""Messages to a webhook, on the first rank.

JSON messages go to `train.notify` at the start and end of a run, at its failure, and at loss
spikes. Slack and Mattermost show `text`. A thread sends the messages, so a slow or unreachable
server neither delays a step nor ends the run.

    {"event": "spike", "run": "llama", "step": 120, "train_iters": 600, "loss": 9.1,
     "text": "llama: step 120 of ..."}
"""

import json
import math
import threading
from queue import SimpleQueue
from typing import Any
from urllib.error import HTTPError
from urllib.request import HTTPRedirectHandler, Request, build_opener

from nanotrain.log import get_logger
from nanotrain.quantities import count_of
from nanotrain.train.hooks.hook import Hook
from nanotrain.train.run import Run
from nanotrain.train.step_report import SPIKE, StepReport

log = get_logger(__name__)

TIMEOUT_S = 10.0  # timeout of one request of NotifyHook
LAST_WAIT_S = 5.0  # wait at the end of the run for messages that are not yet sent
QUIET_STEPS = 50  # steps without another message after a spike


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
        """Send a message if the loss of the step is a spike."""
        if self._sender is None:
            return
        self._keep_facts(report)
        loss = report.output.loss
        is_spike = not math.isfinite(loss) or (report.loss_deviation or 0.0) >= SPIKE
        if is_spike and report.step >= self._next_spike:
            self._next_spike = report.step + QUIET_STEPS
            self._send("spike", f"the loss is {loss:.4g}")

    def _keep_facts(self, report: StepReport) -> None:
        """Keep step and loss for the next message."""
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
        """Send one message on the run."""
        if self._sender is None:
            return
        facts = self._facts
        text = f"{facts['run']}: step {facts['step']} of {facts['train_iters']}: {happened}"
        self._sender.send({"event": event, **facts, "text": text})
