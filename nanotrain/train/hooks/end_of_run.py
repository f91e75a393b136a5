"""At the end of training: a generated text, report.html and the paths of the outputs.

The report is also written every `report_interval` steps.
"""

import json
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from nanotrain.comm.collectives import all_gather_object
from nanotrain.comm.device import peak_memory
from nanotrain.data.tokenizer import document_start, load_tokenizer
from nanotrain.errors import DataError, EnvironmentFault, NanotrainError
from nanotrain.log import get_logger
from nanotrain.plan.compile import with_compile
from nanotrain.quantities import describe_bytes
from nanotrain.runs.files import open_append, write_all
from nanotrain.train.hooks.hook import Hook
from nanotrain.train.run import Run
from nanotrain.train.step_report import StepReport
from nanotrain.train.trackers.table import enabled_trackers

log = get_logger(__name__)

TEMPERATURE = 0.6
TOP_K = 40


class SampleHook(Hook):
    """Generates a text and prints it, on the first rank.

    Args:
        tokenizer: name or path as `load_tokenizer` takes it; None without a tokenizer.
    """

    def __init__(self, tokenizer: str | None) -> None:
        self._tokenizer = tokenizer

    def after_training(self, run: Run) -> None:
        """Generate a text on the first rank, print it and append it to the samples file."""
        run.wait_for_params()
        if not run.context.control.is_first:
            return
        topology = run.context.topology
        is_sharded = topology.world_size > topology.size("dp") or topology.size("ep") > 1
        if is_sharded or run.plan.data_parallel.strategy.shard_params:
            log.info(
                "no sample: the model is sharded over several ranks; "
                "use nanotrain generate on the checkpoint"
            )
            return
        if self._tokenizer is None:
            log.info("no sample: the data has no tokenizer; set --tokenizer-model")
            return
        try:
            text = sample(run, self._tokenizer)
        except DataError as error:
            log.info("no sample: %s", error)
            return
        print(f"\nSample:\n{text}\n", flush=True)
        line = json.dumps({"step": run.state.step, "text": text}).encode() + b"\n"
        try:
            with open_append(run.folder.samples) as file:
                write_all(file, line)
        except (EnvironmentFault, OSError) as error:
            log.warning("the sample is not in %s: %s", run.folder.samples, error)


@dataclass(frozen=True)
class PlannedPeak:
    """Peak memory of a rank, in bytes."""

    planned: int  # for the worst rank
    before: int  # used by this rank before the model was built


class SummaryHook(Hook):
    """Prints run folder, metrics, last checkpoint, and the planned and measured peak memory.

    Args:
        peak: planned memory; None prints no memory.
    """

    runs_always = True

    def __init__(self, peak: PlannedPeak | None = None) -> None:
        self._peak = peak

    def after_training(self, run: Run) -> None:
        """Print where the files of the run are, and its peak memory."""
        latest = run.checkpointer.latest()
        used = peak_memory(run.context.device)
        if self._peak:
            used -= self._peak.before
        used_by_rank = all_gather_object(used, run.context.control)
        if not run.context.control.is_first:
            return
        lines = [f"run folder    {run.folder.path}", f"metrics       {run.folder.metrics}"]
        if run.config.train.report and run.folder.report.is_file():
            lines.append(f"report        {run.folder.report}")
        lines.append(f"checkpoint    {latest or 'none'}")
        if self._peak:
            on_cpu = run.context.device.type == "cpu"
            memory = _describe_memory(self._peak, max(0, *used_by_rank), on_cpu=on_cpu)
            trackers = enabled_trackers(run.config.train)
            if on_cpu and trackers:
                memory += f"; the plan does not count the packages of {' and '.join(trackers)}"
            lines.append(f"memory        {memory}")
        print("\n".join(lines), flush=True)


def _describe_memory(peak: PlannedPeak, used: int, *, on_cpu: bool) -> str:
    """Planned and measured peak memory, in one line."""
    planned = f"planned {describe_bytes(peak.planned)} per rank"
    measured = f"measured at most {describe_bytes(used)}"
    if on_cpu:
        measured += f" above the {describe_bytes(peak.before)} of the process before the model"
    return f"{planned}; {measured}"


def sample(run: Run, tokenizer_name: str) -> str:
    """Generate a text with the current weights; returns prompt and continuation.

    An empty prompt starts a document.
    """
    # imported here: they would only delay the start
    from nanotrain.inference.generate import Sampling, generate

    train = run.config.train
    tokenizer = load_tokenizer(tokenizer_name)
    prompt = tokenizer.encode(train.generate_prompt) or document_start(tokenizer)
    sampling = Sampling(temperature=TEMPERATURE, top_k=TOP_K, seed=train.seed, stop=tokenizer.eod)
    with _running_eagerly(run):
        tokens = generate(
            run.stages[0], prompt, num_tokens=train.generate_tokens, sampling=sampling
        )
    continuation = [token for token in tokens if token != tokenizer.eod]
    return train.generate_prompt + tokenizer.decode(continuation)


def _running_eagerly(run: Run) -> AbstractContextManager[object]:
    """Run compiled blocks eagerly: torch.compile would recompile for the first text lengths."""
    is_compiled = with_compile(run.config, run.context.device.type).train.torch_compile
    return torch.compiler.set_stance("force_eager") if is_compiled else nullcontext()


class ReportHook(Hook):
    """Writes the report of the run, on the first rank; a failure is a warning."""

    def after_step(self, run: Run, report: StepReport) -> None:
        interval = run.config.train.report_interval
        if interval and report.step % interval == 0:
            _write_report(run)

    def after_training(self, run: Run) -> None:
        _write_report(run)


def _write_report(run: Run) -> None:
    """Write the report on the first rank; a failure is a warning."""
    if not run.context.control.is_first:
        return
    # imported here: it would only delay the start of a run
    from nanotrain.report.history import RunHistory
    from nanotrain.report.page import write_report

    try:
        write_report([RunHistory.read(run.folder.path)], run.folder.report)
    except (NanotrainError, OSError) as error:
        log.warning("no report: %s", error)
