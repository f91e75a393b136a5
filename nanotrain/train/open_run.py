"""Open a planned run on this rank.

open_run        the same start on all ranks, the built run, its header, its hooks, the watchdog
choose_hooks    the hooks of a run in call order
header          lines on model, data, batch, layout and precision
"""

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from textwrap import TextWrapper

import torch

from nanotrain.attention.backends import AttentionChoice, AttentionDevice
from nanotrain.comm.device import device_name, peak_memory, reset_peak_memory
from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.config.config import Config
from nanotrain.config.data_stages import read_stages
from nanotrain.config.notation import moves_mtp_layers
from nanotrain.config.schedules import samples_of_steps
from nanotrain.data.build import unchecked_files
from nanotrain.data.corpus_info import read_info
from nanotrain.data.data_path import parse_data_path
from nanotrain.data.run_tokenizer import first_blend
from nanotrain.errors import EnvironmentFault, LocalFault
from nanotrain.log import get_logger
from nanotrain.memory.block_transforms import describe_activations
from nanotrain.optim.lr import LRSchedule
from nanotrain.plan.memory_plan import MemoryPlan
from nanotrain.plan.plan import Plan
from nanotrain.quantities import count_of, describe_count, named_files
from nanotrain.spec.counts import num_active_parameters, num_parameters
from nanotrain.spec.parameters import declare_model
from nanotrain.storage.remote import is_address
from nanotrain.topology.groups import GroupName
from nanotrain.train.build import build_run
from nanotrain.train.evaluate import EvaluateHook
from nanotrain.train.hooks.average_saves import AverageSavesHook
from nanotrain.train.hooks.checkpoint import CheckpointHook
from nanotrain.train.hooks.data_order import DataOrderHook
from nanotrain.train.hooks.description import DescriptionHook, StartFacts
from nanotrain.train.hooks.end_of_run import PlannedPeak, ReportHook, SampleHook, SummaryHook
from nanotrain.train.hooks.faults import DebugNanHook, ReplicasHook
from nanotrain.train.hooks.goodput import GoodputHook
from nanotrain.train.hooks.hook import Hook, TimeoutHook
from nanotrain.train.hooks.log import MAX_WIDTH, MIN_WIDTH, LogHook
from nanotrain.train.hooks.memory_checkpoint import MemoryCheckpointHook
from nanotrain.train.hooks.notify import NotifyHook
from nanotrain.train.hooks.object_storage import UploadHook
from nanotrain.train.hooks.profile import ProfileHook, memory_snapshot
from nanotrain.train.hooks.relayout import RelayoutHook
from nanotrain.train.hooks.replay import ReplayHook
from nanotrain.train.hooks.restart import RestartHook
from nanotrain.train.hooks.stragglers import StragglerHook
from nanotrain.train.hooks.timers import TimersHook
from nanotrain.train.hooks.track import TrackHook
from nanotrain.train.resume.changed_lr import log_changed_lr
from nanotrain.train.resume.from_memory import open_memory_checkpoints
from nanotrain.train.run import Run, RunInputs, TrainState
from nanotrain.train.same_start import require_same_start
from nanotrain.train.trackers.table import enabled_trackers
from nanotrain.watch.sniff import require_sound
from nanotrain.watch.watchdog import watch_ranks

log = get_logger(__name__)


@contextmanager
def open_run(
    plan: Plan, inputs: RunInputs, *, context: ParallelContext, planned: MemoryPlan | None = None
) -> Iterator[tuple[Run, list[Hook]]]:
    """Build a run and its hooks, and watch its ranks until the block ends.

    Args:
        plan: plan of this rank.
        inputs: open datasets, run folder and checkpoint.
        context: device and process groups of this rank.
        planned: memory of the worst rank, for the summary.
    """
    config = plan.config
    inputs = require_same_start(plan, inputs, context=context)
    coords = f" ({context.coords_text})" if context.coords_text else ""
    with (
        open_memory_checkpoints(plan, inputs, context=context) as inputs,
        watch_ranks(context, inputs.folder.path, timeout_s=config.train.hang_timeout_s),
        explaining_memory_errors(f"rank {context.rank}{coords}"),
        memory_snapshot(config.train, context),
    ):
        if config.train.preflight and not inputs.begins_phase:
            factor = config.train.preflight_factor
            log.info("%s", require_sound(context, inputs.folder.path, factor=factor))
        torch.manual_seed(config.train.seed)
        reset_peak_memory(context.device)
        peak = None
        if planned:
            peak = PlannedPeak(planned.total, before=peak_memory(context.device))
        run = build_run(plan, inputs, context=context)
        try:
            device = device_name(context.device)
            if context.rank == 0:
                attention = str(AttentionChoice.of(config, AttentionDevice.of(context.device)))
                log_start(run, attention=attention, device=device)
            facts = StartFacts(device, layout=_describe_layout(run.plan, device), memory=planned)
            hooks = choose_hooks(config, inputs.tokenizer, planned=peak)
            yield run, [DescriptionHook(facts), *hooks]
        finally:
            run.batches.close()


def log_start(run: Run, *, attention: str, device: str) -> None:
    """Log the header of the run, and how far it is."""
    inputs = run.inputs
    width = MAX_WIDTH
    if sys.stderr.isatty():
        width = max(shutil.get_terminal_size().columns, MIN_WIDTH)
    text = header(
        run.plan, inputs, device=device, attention=attention, width=width, state=run.state
    )
    log.info("%s", text)
    unchecked = unchecked_files(inputs.datasets.train)
    if unchecked:
        log.info(
            "without checksums, so that damage is not noticed: %s; `nanotrain prepare` writes them",
            named_files(unchecked),
        )
    if inputs.is_resumed:
        if not inputs.begins_phase:
            log.info("resuming; --no-auto-resume starts a new run")
        log_changed_lr(run)
    steps = run.config.train.train_iters
    if steps == 0:
        log.info("--train-iters 0: everything is built, nothing is trained")
    elif run.state.step >= steps:
        log.info(
            "nothing to do: step %d of %d is done; a larger --train-iters goes on from there",
            run.state.step,
            steps,
        )


def choose_hooks(
    config: Config, tokenizer: str | None, *, planned: PlannedPeak | None = None
) -> list[Hook]:
    """The hooks of a run in call order; validation comes before logging, which reports its loss."""
    return [
        *_hooks_before_log(config, tokenizer),
        LogHook(),
        *_hooks_after_steps(config),
        *_hooks_at_end(config, tokenizer),
        SummaryHook(planned),
    ]


def _hooks_before_log(config: Config, tokenizer: str | None) -> list[Hook]:
    """Hooks whose numbers the log shows."""
    hooks: list[Hook] = []
    later_timeout_s = config.parallel.distributed_timeout_seconds_after_init
    if later_timeout_s is not None:
        hooks.append(TimeoutHook(later_timeout_s))
    if config.evaluates:
        hooks.append(EvaluateHook(tokenizer))
    if config.train.timing_log_level > 0 or config.train.profile:
        hooks.append(TimersHook())
    hooks.append(GoodputHook())
    train = config.train
    if train.log_straggler:
        hooks.append(
            StragglerHook(factor=train.straggler_factor, duration_s=train.straggler_duration_s)
        )
    return hooks


def _hooks_after_steps(config: Config) -> list[Hook]:
    """Hooks that check, record and save steps."""
    train = config.train
    hooks: list[Hook] = []
    if not config.data.mock_data:
        hooks.append(DataOrderHook())
    if train.debug_nan:
        hooks.append(DebugNanHook())
    if train.check_weight_hash_across_dp_replicas_interval > 0:
        hooks.append(ReplicasHook())
    if train.replay_interval > 0:
        hooks.append(ReplayHook())
    if enabled_trackers(train):
        hooks.append(TrackHook())
    if config.checkpoint.average_saves is not None:
        hooks.append(AverageSavesHook(config.checkpoint.average_saves))
    if config.checkpoint.save:
        hooks.append(CheckpointHook())
    if config.checkpoint.memory_checkpoint_interval:
        hooks.append(MemoryCheckpointHook())
    if train.profile:
        hooks.append(ProfileHook())
    return hooks


def _hooks_at_end(config: Config, tokenizer: str | None) -> list[Hook]:
    """Hooks that act at the end of the run, and perhaps before."""
    train = config.train
    hooks: list[Hook] = []
    if train.generate_tokens > 0:
        hooks.append(SampleHook(tokenizer))
    if train.inprocess_restart:
        hooks.append(RestartHook())
    if train.report:
        hooks.append(ReportHook())
    if train.notify is not None:
        hooks.append(NotifyHook())
    if is_address(train.run_dir or ""):
        hooks.append(UploadHook())
    return [*hooks, RelayoutHook()]


# texts of plain RuntimeErrors
HOST_ALLOCATOR = "can't allocate memory"
NOT_DETERMINISTIC = "does not have a deterministic implementation"


@contextmanager
def explaining_memory_errors(rank_text: str) -> Iterator[None]:
    """Raise errors of allocators, and of `--deterministic-mode`, as one message; all others pass.

    Args:
        rank_text: names this rank, as "rank 1 (dp1)".
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        reason = str(error) or type(error).__name__
        if NOT_DETERMINISTIC in reason:
            raise EnvironmentFault(
                "--deterministic-mode cannot be kept",
                why=reason.partition(",")[0],
                fix="leave it out, or what needs this operator",
            ) from error
        # torch.OutOfMemoryError is a RuntimeError
        is_memory_error = isinstance(error, MemoryError | torch.OutOfMemoryError)
        if not is_memory_error and HOST_ALLOCATOR not in reason:
            raise
        raise LocalFault(
            f"{rank_text} ran out of memory",
            why=reason.splitlines()[0],
            fix="lower --micro-batch-size, or shard or recompute more (docs/troubleshooting.md); "
            "the same command resumes from the newest checkpoint",
        ) from error


def header(
    plan: Plan,
    inputs: RunInputs,
    *,
    device: str,
    attention: str = "",
    width: int = 1000,
    state: TrainState | None = None,
) -> str:
    """The lines of the header, each with a label.

    Args:
        plan: plan of any rank.
        inputs: open inputs of the run.
        device: name of the device of this rank.
        attention: the attention backends.
        width: columns; longer lines are wrapped at spaces, commands are not.
        state: counters that the run goes on from; None for a new run.
    """
    facts = {
        "model": _describe_model(plan),
        "data": _describe_data(plan, inputs, state=state or TrainState()),
        "batch": _describe_batch(plan),
        "lr": _describe_warmup(plan),
        "layout": _describe_layout(plan, device),
        "precision": _describe_precision(plan),
        "attention": "; ".join(filter(None, [attention, *_without_compressed_keys(plan)])),
        "memory": describe_activations(plan.config),
        "run folder": str(inputs.folder.path),
    }
    wrapper = TextWrapper(
        width, subsequent_indent=" " * 12, break_long_words=False, break_on_hyphens=False
    )
    lines = []
    for label, text in facts.items():
        if text:
            lines.append(wrapper.fill(f"{label:<10}  {text}"))
    for label, command in _commands(plan, inputs).items():
        lines.append(f"{label:<10}  {command}")
    return "\n".join(lines)


def _describe_model(plan: Plan) -> str:
    """Parameters, layers and sizes of the model, in one line."""
    shape = plan.shape
    total = num_parameters(shape)
    active = num_active_parameters(shape)
    experts = f" ({describe_count(active)} active per token)" if active < total else ""
    layers = count_of(shape.num_layers, "layer")
    sizes = f"hidden size {shape.hidden_size:,}, vocabulary {shape.vocab_size:,}"
    trainable = plan.trainable
    if not trainable.is_everything:
        specs = [spec for spec in declare_model(shape) if trainable.includes(spec.name)]
        trained = sum(spec.numel for spec in specs)
        sizes += f"; {describe_count(trained)} trained, in {count_of(len(specs), 'tensor')}"
    return f"{describe_count(total)} parameters{experts}, {layers}, {sizes}"


def _describe_data(plan: Plan, inputs: RunInputs, *, state: TrainState) -> str:
    """Tokens and epochs that this start reads, stages of the blend, and a missing validation."""
    config = plan.config
    samples = inputs.datasets.train
    num_samples = _num_samples(plan, state)
    tokens = f"{_describe_tokens(num_samples, config)} in {_describe_steps(config, state)}"
    if samples is None or config.data.mock_data:
        return f"synthetic, {tokens}"
    epoch = samples.samples_per_epoch
    corpus = _describe_tokens(epoch, config)
    reader = "this start" if state.step else "this run"
    texts = [f"{corpus}; {reader} reads {tokens}, {num_samples / epoch:.2f} epochs"]
    for stage in read_stages(config.data.stages):
        unit = "sample" if stage.in_samples else "step"
        until = "" if stage.end is None else f", changing until {stage.end:,}"
        texts.append(f"{stage.name} from {unit} {stage.start:,}{until}: {stage.blend}")
    texts += _shares_of_targets(config)
    texts += _ids_outside(plan)
    if config.train.eval_interval and config.train.eval_iters and not config.validates:
        texts.append(f"no validation, --split {config.data.split} leaves no documents for it")
    return "; ".join(texts)


def _num_samples(plan: Plan, state: TrainState) -> int:
    """Samples of the steps that are left."""
    steps = _steps_left(plan.config, state)
    schedule = plan.sampler.schedule
    if schedule is None:
        return steps * plan.sampler.global_batch_size
    consumed = state.consumed_samples
    return samples_of_steps(schedule, steps, consumed=consumed) - consumed


def _steps_left(config: Config, state: TrainState) -> int:
    return max(0, config.train.train_iters - state.step)


def _describe_steps(config: Config, state: TrainState) -> str:
    steps = count_of(_steps_left(config, state), "step")
    return f"{steps} after step {state.step:,}" if state.step else steps


def _describe_tokens(num_samples: int, config: Config) -> str:
    return f"{describe_count(num_samples * config.data.seq_length)} tokens"


def _shares_of_targets(config: Config) -> list[str]:
    """The share of targets in each corpus of conversations."""
    texts = []
    for entry in parse_data_path(first_blend(config.data)):
        info = read_info(entry.prefix)
        if info.targets:
            texts.append(f"{info.targets / info.tokens:.0%} of {entry.prefix} are targets")
    return texts


def _ids_outside(plan: Plan) -> list[str]:
    """A remark on corpora whose tokenizer has more tokens than the model."""
    limit = plan.shape.vocab_size
    remarks = {}
    for entry in parse_data_path(first_blend(plan.config.data)):
        size = read_info(entry.prefix).vocab_size
        if size > limit:
            remarks[entry.prefix] = (
                f"the tokenizer of {entry.prefix} has {size:,} tokens, the model {limit:,}: "
                "a higher id ends the run"
            )
    return list(remarks.values())


def _describe_warmup(plan: Plan) -> str:
    """A remark if the warmup is longer than the run, as when a recipe is tried for a few steps."""
    steps = plan.config.train.train_iters
    optim = plan.config.optim
    batch_size = plan.sampler.global_batch_size
    samples = plan.samples_of(steps)
    schedule = LRSchedule(optim, samples_per_step=batch_size, train_samples=samples)
    if not 0 < samples < schedule.warmup_samples:
        return ""
    last_lr = schedule.lr_at(plan.samples_of(steps - 1))
    warmup = count_of(round(schedule.warmup_samples / batch_size), "step")
    return f"at most {last_lr:.2e} of {optim.lr:.2e}: the run ends within the warmup of {warmup}"


def _without_compressed_keys(plan: Plan) -> list[str]:
    """A remark on layers whose compressed keys have more tokens than a sequence."""
    sizes = plan.shape.compressed
    if sizes is None:
        return []
    length = plan.config.data.seq_length
    remarks = []
    for kind, ratio in (("csa", sizes.sparse_ratio), ("hca", sizes.heavy_ratio)):
        number = plan.shape.mixers.count(kind)
        if number and length < ratio:
            remarks.append(
                f"{count_of(number, 'layer')} without compressed keys: one has "
                f"{count_of(ratio, 'token')}, a sequence {length:,}"
            )
    return remarks


def _describe_batch(plan: Plan) -> str:
    """Samples per step, as data-parallel ranks x microbatches x samples, and tokens per step."""
    sampler = plan.sampler
    size = sampler.global_batch_size
    seq_length = plan.config.data.seq_length
    samples = f"{count_of(size, 'sample')} of {count_of(seq_length, 'token')}"
    if sampler.schedule:
        samples = f"from {sampler.size_at(0):,} to {samples}"
    lengths = sampler.lengths.sizes[:-1] if sampler.lengths else ()
    if lengths:
        first_lengths = ", then ".join(f"{length:,}" for length in lengths)
        samples += f", split at first into sequences of {first_lengths}"
    microbatches = count_of(sampler.num_microbatches, "microbatch")
    micro_batch_size = plan.config.train.micro_batch_size
    parts = f"{sampler.dp_size} data-parallel x {microbatches} x {micro_batch_size}"
    padded = sampler.num_padded
    if padded:
        parts += f" ({padded / (size + padded):.1%} of them padding)"
    return f"{samples} = {parts}; {describe_count(size * seq_length)} tokens per step"


def _describe_layout(plan: Plan, device: str) -> str:
    """Sizes of the parallel axes above 1, pipeline schedule and sharding strategy."""
    topology = plan.topology
    parallel = plan.config.parallel
    axes: list[GroupName] = ["tp", "cp", "pp"]
    if plan.config.model.moe is not None:
        axes += ["ep", "etp"]
    texts = [f"{count_of(topology.world_size, 'rank')} on {device}"]
    for axis in axes:
        if topology.size(axis) > 1:
            texts.append(f"{axis} {topology.size(axis)}")
    dp_size = parallel.data_parallel_size(topology.world_size)
    if dp_size > 1:
        texts.append(f"dp {dp_size}")
    if topology.size("pp") > 1:
        texts.append(f"schedule {parallel.pipeline_schedule}")
    stages = parallel.pipeline_model_parallel_layout
    if stages and moves_mtp_layers(stages):
        texts.append(
            "multi-token prediction on the last stage, with the head (m of the layout is before it)"
        )
    texts.append(parallel.data_parallel_sharding_strategy)
    return ", ".join(texts)


def _describe_precision(plan: Plan) -> str:
    """Dtypes of params, main params, moments and main grads, and fp8 if enabled."""
    precision = plan.config.precision
    params = precision.params_dtype
    main = precision.main_params_dtype
    first = precision.exp_avg_dtype
    second = precision.exp_avg_sq_dtype
    text = "fp32" if params == "fp32" else f"{params}, main params and optimizer in fp32"
    if {main, first, second} != {"fp32"}:
        moments = first if first == second else f"{first} and {second}"
        text = f"{params}, main params in {main}, moments in {moments}"
    if precision.main_grads_dtype != "fp32":
        text = f"{text}, main grads in {precision.main_grads_dtype}"
    if precision.fp8 is None:
        return text
    products = f"{precision.products_dtype} ({precision.fp8.format}, {precision.fp8.recipe})"
    return f"{text}, linear layers in {products}"


def _commands(plan: Plan, inputs: RunInputs) -> dict[str, str]:
    """Commands that show the running job, by label; each is one line, so that it can be copied."""
    train = plan.config.train
    path = inputs.folder.path
    commands = {"watch": f"nanotrain watch {path}"}
    if train.tensorboard:
        commands["curves"] = f"tensorboard --logdir {train.tensorboard_dir or path / 'tensorboard'}"
    return commands
