"""Loss, perplexity and bits per byte in any layout, for `nanotrain evaluate` and validation.

    checkpoint or Hugging Face folder -> Config -> Plan -> stages with storage
    -> weights of this rank's boxes

    token files, or text and its tokenizer -> windows of seq_length tokens -> forward passes
    -> one loss

Every token but the first is predicted once, given the tokens before it in its window. `nanotrain
evaluate` builds no optimizer. Validation is over the same samples each time.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nanotrain.comm.collectives import all_gather_object, all_reduce_scalars
from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.comm.stop_point import PassStopped
from nanotrain.config.config import Config
from nanotrain.data.build import corpora_of
from nanotrain.data.corpus_info import CorpusInfo, write_info
from nanotrain.data.gpt import AllWindows
from nanotrain.data.indexed import IndexedTokens
from nanotrain.data.loader import GlobalBatchLoader
from nanotrain.data.remote import open_file
from nanotrain.data.tasks import Task, TaskScore
from nanotrain.data.token_bytes import TokenBytes
from nanotrain.data.token_format import idx_path, prefix_of
from nanotrain.data.tokenizer import Tokenizer, is_local, load_tokenizer
from nanotrain.data.whole import WholeSplit
from nanotrain.errors import DataError
from nanotrain.inference.checkpoint import OpenedCheckpoint
from nanotrain.log import get_logger
from nanotrain.model.context import BatchContext
from nanotrain.parallel.pp.executor import run_forward
from nanotrain.paths import path_or_address
from nanotrain.plan.plan import Plan
from nanotrain.prepare.chunks import plan_chunks
from nanotrain.prepare.encoder import DocumentEncoder
from nanotrain.prepare.readers import DocumentReader
from nanotrain.prepare.token_writer import TokenWriter
from nanotrain.quantities import count_of
from nanotrain.spec.params import LocalParam
from nanotrain.train.build import BuiltStage, build_batch_iterator, build_pipeline, build_stages
from nanotrain.train.hooks.hook import Hook
from nanotrain.train.parts.router_balance import tensors_of_routers
from nanotrain.train.run import Run, StopRequest
from nanotrain.train.step import global_loss
from nanotrain.train.step_report import StepReport
from nanotrain.train.tasks import score_task

log = get_logger(__name__)


@dataclass(frozen=True)
class Evaluation:
    """The result on a corpus, equal on every rank."""

    loss: float  # mean cross-entropy per predicted token, in nats
    tokens: int  # predicted tokens
    # bytes of UTF-8 text in the predicted tokens; None if the tokenizer is unknown
    bytes: int | None

    @classmethod
    def total(cls, parts: Sequence["Evaluation"]) -> "Evaluation":
        """The result on all parts together."""
        tokens = 0
        loss_sum = 0.0
        num_bytes: int | None = 0
        for part in parts:
            tokens += part.tokens
            loss_sum += part.loss * part.tokens
            if num_bytes is not None:
                num_bytes = None if part.bytes is None else num_bytes + part.bytes
        return cls(loss_sum / max(tokens, 1), tokens, num_bytes)

    @property
    def perplexity(self) -> float:
        """The exponential of the loss."""
        return math.exp(min(self.loss, 700.0))

    @property
    def bits_per_byte(self) -> float | None:
        """The loss per byte of text, in bits."""
        return self.loss * self.tokens / math.log(2) / self.bytes if self.bytes else None

    def to_dict(self) -> dict[str, Any]:
        """The fields, perplexity and bits per byte."""
        return asdict(self) | {"perplexity": self.perplexity, "bits_per_byte": self.bits_per_byte}

    def text(self) -> str:
        """The result in one line."""
        texts = [f"loss {self.loss:.4f}", f"perplexity {self.perplexity:,.2f}"]
        size = count_of(self.tokens, "token")
        if self.bytes:
            texts.append(f"bits per byte {self.bits_per_byte:.4f}")
            size += f", {count_of(self.bytes, 'byte')}"
        return " | ".join([*texts, size])


@contextmanager
def open_corpus(source: str, tokenizer: Tokenizer | None) -> Iterator[IndexedTokens]:
    """Open token files by their prefix, or tokenize text into temporary token files.

    Args:
        source: prefix of token files, or a text file, folder or .jsonl.
        tokenizer: tokenizer for text; None if unknown.

    Raises:
        DataError: there is no such corpus, or text without a tokenizer.
    """
    prefix = path_or_address(prefix_of(source))
    if open_file(idx_path(prefix)) is not None:
        yield IndexedTokens(prefix)
        return
    if not Path(source).exists():
        raise DataError(
            f"there is no corpus {source}",
            why="it is neither a prefix of .bin/.idx files nor a text file or folder",
            fix="check --data",
        )
    if tokenizer is None:
        raise DataError(
            f"{source} is text, which cannot be tokenized",
            why="the model names no tokenizer",
            fix="set --tokenizer",
        )
    with TemporaryDirectory(prefix="nanotrain-evaluate-") as folder:
        written = Path(folder) / "tokens"
        _write_tokens(source, tokenizer, prefix=written)
        yield IndexedTokens(written)


def _write_tokens(source: str, tokenizer: Tokenizer, *, prefix: Path) -> None:
    """Tokenize the documents of a text source into a pair of token files."""
    reader = DocumentReader("text")
    encoder = DocumentEncoder(tokenizer)
    end = [] if tokenizer.eod is None else [tokenizer.eod]
    with TokenWriter(prefix, np.dtype(np.int32)) as writer:
        for chunk in plan_chunks([source], subset=None, split="train"):
            for text in reader.read(chunk):
                writer.add_documents([[*encoder.encode(text), *end]])
    write_info(prefix, CorpusInfo(uneven_documents=encoder.counts.uneven))


def windows_of(corpus: IndexedTokens, config: Config) -> AllWindows:
    """The windows of a corpus with the masks of the data section.

    Raises:
        DataError: fewer than two tokens.
    """
    vocab_size = config.model.vocab_size
    assert vocab_size is not None, "a model has a vocabulary"
    if corpus.num_tokens < 2:
        raise DataError(
            f"{corpus.prefix} has {count_of(corpus.num_tokens, 'token')}",
            why="a prediction needs a token before it",
            fix="evaluate on a longer text",
        )
    return AllWindows(corpus, 0, corpus.num_tokens, config.data, vocab_size=vocab_size)


def load_weights(model: OpenedCheckpoint, stages: Mapping[int, BuiltStage]) -> None:
    """Read this rank's boxes of the parameters, and the expert biases of its routers."""

    def fill(params: Sequence[LocalParam], *, module: nn.Module, is_sharded: bool) -> None:
        """Read boxes of parameters into the storage of a module."""
        boxes = {local.tensor_box: module.get_parameter(local.spec.name).data for local in params}
        if not is_sharded:
            model.read_params(boxes)
            return
        # files must not be read into the storage of gathered units, which is freed by resizing
        copies = {box: torch.empty_like(target) for box, target in boxes.items()}
        model.read_params(copies)
        torch._foreach_copy_(list(boxes.values()), list(copies.values()))

    for stage in stages.values():
        for dp in stage.callbacks:
            is_sharded = dp.options.strategy.shard_params
            dp.fill_params(partial(fill, module=stage.module, is_sharded=is_sharded))
    biases = tensors_of_routers({index: stage.module for index, stage in stages.items()})
    if biases:
        model.read_params(biases)


def load_stages(
    model: OpenedCheckpoint, *, plan: Plan, context: ParallelContext
) -> dict[int, BuiltStage]:
    """The stages of a model in a layout, with their weights gathered for forward passes.

    Args:
        model: checkpoint or Hugging Face folder.
        plan: plan of this rank, for the model's configuration in this layout.
        context: device and groups.
    """
    stages = build_stages(plan, context)
    load_weights(model.with_model(plan.config.model), stages)
    for stage in stages.values():
        for dp in stage.callbacks:
            dp.start_param_gather()
            dp.wait_for_params()
    return stages


def score_model(
    model: OpenedCheckpoint, tasks: Sequence[Task], *, plan: Plan, context: ParallelContext
) -> dict[str, TaskScore]:
    """Score a model on tasks; every rank calls this. Arguments as for `evaluate_model`."""
    stages = load_stages(model, plan=plan, context=context)
    pipeline = build_pipeline(plan, context)
    scores = {}
    for task in tasks:
        score = score_task(task, plan=plan, stages=stages, pipeline=pipeline, context=context)
        if score is not None:
            scores[task.name] = score
    return scores


@torch.no_grad()
def evaluate_model(
    model: OpenedCheckpoint,
    source: str,
    *,
    plan: Plan,
    context: ParallelContext,
    tokenizer: Tokenizer | None = None,
    max_samples: int | None = None,
) -> Evaluation:
    """Evaluate a model on a corpus; every rank calls this.

    Args:
        model: checkpoint or Hugging Face folder.
        source: prefix of token files, or text.
        plan: plan of this rank, for the model's configuration in this layout.
        context: device and groups.
        tokenizer: tokenizer of the model; None if unknown.
        max_samples: number of windows to read, from the first; None for all.

    Raises:
        DataError: no such corpus, fewer than two tokens, or text without a tokenizer.
    """
    stages = load_stages(model, plan=plan, context=context)
    assert plan.config.model.vocab_size is not None, "a model has a vocabulary"
    sizes = None if tokenizer is None else TokenBytes.of(tokenizer, plan.config.model.vocab_size)
    forward = partial(
        run_forward, plan.valid_schedule, stages, pipeline=build_pipeline(plan, context)
    )
    with open_corpus(source, tokenizer) as corpus:
        windows = windows_of(corpus, plan.config)
        if sizes is not None and not sizes.are_known([corpus.prefix]):
            sizes = None
        if max_samples is not None:
            stop = min(windows.stop, max_samples * plan.config.data.seq_length + 1)
            windows = replace(windows, stop=stop)
        num_batches = -(-windows.samples_per_epoch // plan.sampler.global_batch_size)
        with GlobalBatchLoader(windows, sampler=plan.sampler) as batches:
            evaluation = _evaluate(
                batches, forward, num_batches=num_batches, sizes=sizes, context=context
            )
    assert evaluation is not None, "no rank asks to stop"
    return evaluation


class EvaluateHook(Hook):
    """Validates before the first step, every `eval_interval` steps and after the last one.

    Args:
        tokenizer: name or path as `load_tokenizer` takes it, for bits per byte; None without one.
    """

    def __init__(self, tokenizer: str | None = None) -> None:
        self._tokenizer = tokenizer
        self._sizes: TokenBytes | None = None  # None where the bytes of tokens are unknown

    def before_training(self, run: Run) -> None:
        """Load the bytes per token, for bits per byte, and validate before the first step."""
        is_found = self._tokenizer is not None and is_local(self._tokenizer)
        # machines may have different files
        if all(all_gather_object(is_found, run.context.control)):
            assert self._tokenizer is not None
            assert run.config.model.vocab_size is not None, "set by open_inputs"
            tokenizer = load_tokenizer(self._tokenizer)
            sizes = TokenBytes.of(tokenizer, run.config.model.vocab_size)
            prefixes = _validation_prefixes(run)
            are_known = sizes is not None and sizes.are_known(prefixes)
            if all(all_gather_object(are_known, run.context.control)):
                self._sizes = sizes
        if run.state.step == 0 and run.config.train.train_iters > 0:
            results = validate(run, self._sizes)
            if results:
                total = Evaluation.total(list(results.values()))
                log.info("validation loss before training: %.4f", total.loss)

    def after_step(self, run: Run, report: StepReport) -> None:
        """Validate and score the tasks at each `eval_interval` and after the last step."""
        train = run.config.train
        if report.step % train.eval_interval and report.step != train.train_iters:
            return
        results = validate(run, self._sizes)
        if results:
            total = Evaluation.total(list(results.values()))
            report.valid_loss = total.loss
            report.valid_bits_per_byte = total.bits_per_byte
        evaluation = _named_losses(results or {})
        evaluation |= self._score_tasks(run)
        report.evaluation = evaluation or None

    def _score_tasks(self, run: Run) -> dict[str, float]:
        """The scores of the tasks, without tasks that a signal ends."""
        values = {}
        for task in run.inputs.tasks:
            score = score_task(
                task,
                plan=run.plan,
                stages=run.runnable,
                pipeline=run.pipeline,
                context=run.context,
                stop=run.stop,
            )
            if score is not None:
                for name, value in asdict(score).items():
                    values[f"task/{task.name}/{name}"] = value
        return values


def _validation_prefixes(run: Run) -> list[Path]:
    """The corpora that validation reads."""
    datasets = run.inputs.datasets
    prefixes = []
    for samples in (datasets.valid, *datasets.valid_sets.values()):
        prefixes += [dataset.corpus.prefix for dataset in corpora_of(samples)]
    return prefixes


def validate(run: Run, sizes: TokenBytes | None = None) -> dict[str, Evaluation] | None:
    """Evaluate the first `eval_iters` global batches of every validation set, or all of them.

    Args:
        run: run with its validation sets.
        sizes: bytes of the tokens; None if they are unknown.

    Returns:
        Results by name, "" for the split of the training corpus. None if a rank received a signal
        meanwhile: schedulers kill jobs that do not end soon.
    """
    datasets = run.inputs.datasets
    valid_sets = datasets.valid_sets
    if not valid_sets and datasets.valid is not None and run.config.validates:
        valid_sets = {"": datasets.valid}
    forward = partial(run_forward, run.plan.valid_schedule, run.runnable, pipeline=run.pipeline)
    sampler = replace(run.plan.sampler, schedule=None, lengths=None)
    results = {}
    for name, samples in valid_sets.items():
        num_batches = run.config.train.eval_iters
        if run.config.train.full_validation:
            samples = WholeSplit.of(samples)
            num_batches = -(-samples.samples_per_epoch // sampler.global_batch_size)
        with GlobalBatchLoader(samples, sampler=sampler) as batches:
            result = _evaluate(
                batches,
                forward,
                num_batches=num_batches,
                sizes=sizes,
                context=run.context,
                stop=run.stop,
            )
        if result is None:
            return None
        results[name] = result
    return results


def _named_losses(results: Mapping[str, Evaluation]) -> dict[str, float]:
    """The losses of named validation sets, and bits per byte where the bytes are known."""
    values = {}
    bits = {}
    for name, result in results.items():
        if name:
            values[f"valid/{name}/loss"] = result.loss
            if result.bits_per_byte is not None:
                bits[f"valid/{name}/bits_per_byte"] = result.bits_per_byte
    return values | bits


@torch.no_grad()
def _evaluate(
    batches: GlobalBatchLoader,
    forward: Callable[..., Tensor],
    *,
    num_batches: int,
    sizes: TokenBytes | None,
    context: ParallelContext,
    stop: StopRequest | None = None,
) -> Evaluation | None:
    """The mean loss of the first batches; None if a rank received a signal.

    Args:
        batches: microbatches of this rank.
        forward: microbatches -> the summed loss of this rank.
        num_batches: number of global batches.
        sizes: bytes of the tokens; None if they are unknown.
        context: device and groups.
        stop: signals of this rank; None if they are not handled.
    """
    batch_iterator = build_batch_iterator(batches, context)
    num_tokens = 0
    # fp32 rounds the sum of a long corpus
    loss = torch.zeros((), dtype=torch.float64, device=context.device)
    size_of_token = None if sizes is None else torch.tensor(sizes.sizes, device=context.device)
    num_bytes = torch.zeros((), dtype=torch.int64, device=context.device)
    for _ in range(num_batches):
        context.heartbeat.begin("validation")
        batch = batch_iterator.next(wants_stop=bool(stop))
        if batch is None:
            return None
        num_tokens += batch.num_target_tokens
        microbatches = []
        for part in batch.microbatches:
            microbatches.append(BatchContext.of(part, cp=context.group("cp")))
            if size_of_token is not None:
                sizes_of_targets = torch.where(part.loss_mask > 0, size_of_token[part.labels], 0)
                num_bytes += sizes_of_targets.sum()
                if sizes is not None and sizes.added:
                    begins = (part.tokens == sizes.eod) & (part.loss_mask > 0)
                    num_bytes -= sizes.added * begins.sum()
        try:
            loss += forward(microbatches=microbatches)
        except PassStopped:
            return None
    total_bytes = None
    if size_of_token is not None:
        readers = batches.sampler.readers_per_sample
        total_bytes = _sum_over_samples(num_bytes, context, readers_per_sample=readers)
    return Evaluation(global_loss(loss, context) / max(num_tokens, 1), num_tokens, total_bytes)


def _sum_over_samples(local: Tensor, context: ParallelContext, *, readers_per_sample: int) -> int:
    """Sum a count of this rank's tokens over all ranks, each token counted once. Collective."""
    (total,) = all_reduce_scalars([float(local.item())], context.group("world"))
    return round(total) * context.group("cp").size // readers_per_sample
