"""Validation: mean loss over the same samples each time, in every topology."""

from dataclasses import replace

import torch

from nanotrain.data.loader import GlobalBatchLoader
from nanotrain.log import get_logger
from nanotrain.model.context import BatchContext
from nanotrain.parallel.pp.executor import run_forward
from nanotrain.train.build import build_batch_iterator
from nanotrain.train.hooks.hook import Hook
from nanotrain.train.metrics import StepReport
from nanotrain.train.run import Run
from nanotrain.train.step import global_loss

log = get_logger(__name__)


class EvaluateHook(Hook):
    """Validates before the first step, every `eval_interval` steps and after the last one."""

    def before_training(self, run: Run) -> None:
        if run.state.step == 0 and run.config.train.train_iters > 0:
            loss = evaluate(run)
            if loss is not None:
                log.info("validation loss before training: %.4f", loss)

    def after_step(self, run: Run, report: StepReport) -> None:
        train = run.config.train
        if report.step % train.eval_interval == 0 or report.step == train.train_iters:
            report.valid_loss = evaluate(run)


@torch.no_grad()
def evaluate(run: Run) -> float | None:
    """Mean cross-entropy over the first `eval_iters` global batches of the validation split.

    None if a rank received a signal meanwhile: schedulers kill what does not end soon.
    """
    samples = run.inputs.datasets.valid
    assert samples is not None, "open_inputs requires a validation split where eval_interval is set"
    loss, num_tokens = torch.zeros((), device=run.context.device), 0
    with GlobalBatchLoader(samples, sampler=replace(run.plan.sampler, schedule=None)) as batches:
        batch_iterator = build_batch_iterator(batches, run.context)
        for _ in range(run.config.train.eval_iters):
            run.context.heartbeat.begin("validation")
            batch = batch_iterator.next(wants_stop=bool(run.stop))
            if batch is None:
                return None
            num_tokens += batch.num_target_tokens
            microbatches = [BatchContext.of(part, cp=run.context.group("cp")) for part in batch.microbatches]
            loss += run_forward(run.plan.valid_schedule, run.runnable, microbatches=microbatches, pipeline=run.pipeline)
    return global_loss(loss, run.context) / max(num_tokens, 1)
