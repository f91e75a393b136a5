"""Validation: mean loss over the same samples each time, in every topology."""

from dataclasses import replace
from functools import partial

import torch

from nanotrain.comm.collectives import all_gather_object
from nanotrain.comm.stop_point import PassStopped
from nanotrain.data.loader import GlobalBatchLoader
from nanotrain.data.token_bytes import bytes_per_token
from nanotrain.data.tokenizer import is_local, load_tokenizer
from nanotrain.log import get_logger
from nanotrain.model.context import BatchContext
from nanotrain.parallel.pp.executor import run_forward
from nanotrain.train.build import build_batch_iterator
from nanotrain.train.evaluate import ByteCount, Evaluation
from nanotrain.train.hooks.hook import Hook
from nanotrain.train.metrics.step_report import StepReport
from nanotrain.train.run import Run
from nanotrain.train.step import global_loss

log = get_logger(__name__)


class EvaluateHook(Hook):
    """Validates before the first step, every `eval_interval` steps and after the last one.

    Args:
        tokenizer: name or path as `load_tokenizer` takes it, for bits per byte; None without one.
    """

    def __init__(self, tokenizer: str | None = None) -> None:
        self._tokenizer = tokenizer
        self._sizes: list[int] | None = None  # bytes per token; None where they are unknown

    def before_training(self, run: Run) -> None:
        is_found = self._tokenizer is not None and is_local(self._tokenizer)
        if all(all_gather_object(is_found, run.context.control)):  # machines may have different files
            assert self._tokenizer is not None
            assert run.config.model.vocab_size is not None, "set by open_inputs"
            self._sizes = bytes_per_token(load_tokenizer(self._tokenizer), run.config.model.vocab_size)
        if run.state.step == 0 and run.config.train.train_iters > 0:
            result = validate(run, self._sizes)
            if result is not None:
                log.info("validation loss before training: %.4f", result.loss)

    def after_step(self, run: Run, report: StepReport) -> None:
        train = run.config.train
        if report.step % train.eval_interval == 0 or report.step == train.train_iters:
            result = validate(run, self._sizes)
            if result is not None:
                report.valid_loss, report.valid_bits_per_byte = result.loss, result.bits_per_byte


def evaluate(run: Run) -> float | None:
    """The mean cross-entropy of `validate`."""
    result = validate(run)
    return None if result is None else result.loss


@torch.no_grad()
def validate(run: Run, sizes: list[int] | None = None) -> Evaluation | None:
    """Evaluate the first `eval_iters` global batches of the validation split; `sizes` are the bytes per token.

    None if a rank received a signal during the validation: schedulers kill jobs that do not end soon.
    """
    samples = run.inputs.datasets.valid
    assert samples is not None, "open_inputs requires a validation split where eval_interval is set"
    loss, num_tokens = torch.zeros((), dtype=torch.float64, device=run.context.device), 0
    counter = ByteCount(sizes, context=run.context)
    with GlobalBatchLoader(samples, sampler=replace(run.plan.sampler, schedule=None, lengths=None)) as batches:
        batch_iterator = build_batch_iterator(batches, run.context)
        for _ in range(run.config.train.eval_iters):
            run.context.heartbeat.begin("validation")
            batch = batch_iterator.next(wants_stop=bool(run.stop))
            if batch is None:
                return None
            num_tokens += batch.num_target_tokens
            counter.add(batch.microbatches)
            microbatches = [BatchContext.of(part, cp=run.context.group("cp")) for part in batch.microbatches]
            forward = partial(run_forward, run.plan.valid_schedule, run.runnable, pipeline=run.pipeline)
            try:
                loss += forward(microbatches=microbatches)
            except PassStopped:
                return None
    return Evaluation(global_loss(loss, run.context) / max(num_tokens, 1), num_tokens, counter.total())
