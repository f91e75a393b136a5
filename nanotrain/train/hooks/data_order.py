"""The order of a run's samples: a record for `nanotrain data`, and changes of the blend.

`nanotrain data mix` changes the blend while the run goes on.
"""

from dataclasses import dataclass, replace

from nanotrain.checkpoint.all_ranks import run_on_first
from nanotrain.checkpoint.remote_checkpointer import RemoteCheckpointer
from nanotrain.data.blend import BlendedDataset
from nanotrain.data.build import corpora_of
from nanotrain.data.mix import (
    MixRequest,
    is_recorded,
    read_request,
    record_mix,
    remove_request,
    stages_of,
    with_mix,
    with_stages,
)
from nanotrain.data.order import OrderStart
from nanotrain.data.run_tokenizer import uses_quickstart
from nanotrain.errors import NanotrainError, StorageFault
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
        """Apply a request to change the blend of corpora, at a logged step, on all ranks."""
        if not report.is_logged:
            return
        try:
            request = run_on_first(run.context.control, lambda: _open_request(run))
            if request is None:
                return
            change = _plan_change(run, request)
            run_on_first(run.context.control, lambda: _record(run, change))
        except NanotrainError as error:  # the same on every rank, whose steps go on
            if run.context.control.is_first:
                log.warning("%s", error)
            return
        run.batches.dataset = change.mixed
        run.batch_iterator.discard()
        run.batches.restart(
            consumed_samples=run.state.consumed_samples, skipped_samples=run.state.skipped_samples
        )
        if run.context.control.is_first:
            _order_of(run).append_to(run.folder.path)
            log.info("from step %d on the blend is %s", change.step, " ".join(request.weights))


@dataclass(frozen=True)
class _Change:
    """A change of the blend that was asked for."""

    request: MixRequest
    step: int  # the first with the new blend
    mixed: BlendedDataset


def _open_request(run: Run) -> MixRequest | None:
    """The request in the run folder that is not carried out yet; on the first rank."""
    folder = run.folder.path
    request = read_request(folder)
    if request is None or not is_recorded(folder, request):
        return request
    _upload_record(run)  # a kill came after the record
    remove_request(folder, request)
    return None


def _plan_change(run: Run, request: MixRequest) -> _Change:
    """The samples after a request; one that cannot be carried out is removed.

    Raises:
        DataError: it names other corpora, or a step at which the blend cannot change.
    """
    step = max(request.step or 0, run.state.step + 1)
    try:
        start = _order_of(run).samples(step).start
        return _Change(request, step, with_mix(run.batches.dataset, request.weights, sample=start))
    except NanotrainError:
        if run.context.control.is_first:
            remove_request(run.folder.path, request)
        raise


def _record(run: Run, change: _Change) -> None:
    """Record a change, upload the record, then remove the request; on the first rank.

    Raises:
        StorageFault: the record cannot be written: the request stays, and the blend as it is.
    """
    folder = run.folder.path
    stages = stages_of(change.mixed)
    record_mix(
        folder,
        stages,
        step=change.step,
        number=change.request.number,
        origin=change.mixed.first,
    )
    try:
        _upload_record(run)
    except StorageFault as error:  # the next save uploads it
        log.warning("%s; the change of the blend is recorded in %s", error, folder)
    remove_request(folder, change.request)


def _upload_record(run: Run) -> None:
    """Upload the changed files of a run in object storage."""
    if isinstance(run.checkpointer, RemoteCheckpointer):
        run.checkpointer.files.upload()


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
        origin=run.inputs.data_origin,
    )
