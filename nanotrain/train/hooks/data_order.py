"""The order of a run's samples: a record for `nanotrain data`, and changes of the blend.

`nanotrain data mix` changes the blend while the run goes on.
"""

from dataclasses import replace

from nanotrain.checkpoint.all_ranks import run_on_first
from nanotrain.data.blend import BlendedDataset
from nanotrain.data.build import corpora_of, uses_quickstart
from nanotrain.data.mix import record_mix, stages_of, take_request, with_mix, with_stages
from nanotrain.data.order import OrderStart
from nanotrain.errors import NanotrainError
from nanotrain.log import get_logger
from nanotrain.train.hooks.hook import Hook
from nanotrain.train.run import Run
from nanotrain.train.step_report import StepReport

log = get_logger(__name__)


class DataOrderHook(Hook):
    """Writes data-order.jsonl on the first rank.

    At logged steps all ranks take a request of `nanotrain data mix`.
    """

    def __init__(self) -> None:
        self._start: OrderStart | None = None  # of the samples of this start, until it is written

    def before_training(self, run: Run) -> None:
        self._start = _order_of(run)

    def begin_writing(self, run: Run, *, step: int) -> None:
        assert self._start is not None, "set before training"
        if run.context.control.is_first:
            self._start.append_to(run.folder.path)

    def after_rollback(self, run: Run, report: StepReport) -> None:
        if run.context.control.is_first:
            _order_of(run).append_to(run.folder.path)

    def after_step(self, run: Run, report: StepReport) -> None:
        if not report.is_logged:
            return
        try:
            request = run_on_first(run.context.control, lambda: take_request(run.folder.path))
            if request is None:
                return
            step = max(request["step"] or 0, run.state.step + 1)
            start = _order_of(run).samples(step).start
            mixed = with_mix(run.batches.dataset, request["weights"], sample=start)
        except NanotrainError as error:  # the same on every rank, whose steps go on
            if run.context.control.is_first:
                log.warning("%s", error)
            return
        run.batches.dataset = mixed
        run.batch_iterator.discard()
        run.batches.restart(
            consumed_samples=run.state.consumed_samples, skipped_samples=run.state.skipped_samples
        )
        if run.context.control.is_first:
            record_mix(run.folder.path, stages_of(mixed), step=step)
            _order_of(run).append_to(run.folder.path)
            log.info("from step %d on the blend is %s", step, " ".join(request["weights"]))


def _order_of(run: Run) -> OrderStart:
    """The state that the order of the samples after the last step follows from."""
    config = run.config
    data = config.data
    dataset = run.batches.dataset
    if uses_quickstart(data):  # it belongs to the run folder
        prefixes = [str(part.corpus.prefix) for part in corpora_of(run.dataset)]
        data = replace(data, data_path=prefixes)
    elif dataset is not run.dataset and isinstance(dataset, BlendedDataset):
        data = with_stages(data, stages_of(dataset))
    train = replace(config.train, global_batch_size=run.plan.sampler.global_batch_size)
    return OrderStart(
        run.state.step,
        consumed_samples=run.state.consumed_samples,
        skipped_samples=run.state.skipped_samples,
        curve_batch_size=run.state.curve_batch_size,
        vocab_size=run.plan.shape.vocab_size,
        config=replace(config, data=data, train=train),
    )
