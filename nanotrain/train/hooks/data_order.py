"""`data-order.jsonl`: from what the order of a run's samples follows, at every start and rollback."""

from dataclasses import replace

from nanotrain.data.build import corpora_of, uses_quickstart
from nanotrain.data.order import OrderStart
from nanotrain.train.hooks.hook import Hook
from nanotrain.train.run import Run
from nanotrain.train.step_report import StepReport


class DataOrderHook(Hook):
    """Writes a row for `nanotrain data`, on the first rank."""

    def before_training(self, run: Run) -> None:
        if not run.context.control.is_first:
            return
        config, state, plan = run.config, run.state, run.plan
        data = config.data
        if uses_quickstart(data):  # it belongs to the run folder
            data = replace(data, data_path=[str(part.corpus.prefix) for part in corpora_of(run.dataset)])
        train = replace(config.train, global_batch_size=plan.sampler.global_batch_size)
        OrderStart(
            state.step,
            consumed_samples=state.consumed_samples,
            skipped_samples=state.skipped_samples,
            curve_batch_size=state.curve_batch_size,
            vocab_size=plan.shape.vocab_size,
            config=replace(config, data=data, train=train),
        ).append_to(run.folder.path)

    def after_rollback(self, run: Run, report: StepReport) -> None:
        self.before_training(run)
