"""Open a planned run on this rank: the same start on all ranks, the built run, its header, its
hooks, the watchdog.
"""

import shutil
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from textwrap import TextWrapper

import torch

from nanotrain.attention.backends import AttentionChoice, AttentionDevice
from nanotrain.checkpoint.all_ranks import run_on_all
from nanotrain.comm.device import device_name, peak_memory, reset_peak_memory
from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.config.config import Config
from nanotrain.config.load import to_yaml
from nanotrain.config.notation import moves_mtp_layers, read_stages
from nanotrain.data.build import first_blend
from nanotrain.data.corpus_info import read_info
from nanotrain.data.data_path import parse_data_path
from nanotrain.data.tokenizer import load_with_files
from nanotrain.errors import DataError, EnvironmentFault, LocalFault
from nanotrain.log import get_logger
from nanotrain.memory.block_transforms import describe_activations
from nanotrain.optim.lr import LRSchedule
from nanotrain.plan.memory_plan import MemoryPlan
from nanotrain.plan.plan import Plan
from nanotrain.quantities import count_of, describe_count
from nanotrain.runs.files import OTHER_FOLDER, disk_errors, make_folder, remove_folder
from nanotrain.spec.counts import num_active_parameters, num_parameters
from nanotrain.storage.remote import is_address
from nanotrain.train.build import build_run
from nanotrain.train.evaluate import EvaluateHook
from nanotrain.train.hooks.checkpoint import CheckpointHook
from nanotrain.train.hooks.data_order import DataOrderHook
from nanotrain.train.hooks.end_of_run import PlannedPeak, ReportHook, SampleHook, SummaryHook
from nanotrain.train.hooks.faults import DebugNanHook, ReplicasHook
from nanotrain.train.hooks.hook import Hook, TimeoutHook
from nanotrain.train.hooks.log import MAX_WIDTH, MIN_WIDTH, LogHook
from nanotrain.train.hooks.object_storage import UploadHook
from nanotrain.train.hooks.profile import ProfileHook, memory_snapshot
from nanotrain.train.hooks.timers import TimersHook
from nanotrain.train.hooks.track import TRACKERS, NotifyHook, TrackHook
from nanotrain.train.run import Run, RunInputs
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
    inputs, config, device = (
        require_same_start(plan, inputs, context=context),
        plan.config,
        context.device,
    )
    coords = f" ({context.coords_text})" if context.coords_text else ""
    with (
        watch_ranks(context, inputs.folder.path, timeout_s=config.train.hang_timeout_s),
        explaining_memory_errors(f"rank {context.rank}{coords}"),
        memory_snapshot(config.train, context),
    ):
        torch.manual_seed(config.train.seed)
        reset_peak_memory(device)
        peak = PlannedPeak(planned.total, before=peak_memory(device)) if planned else None
        run = build_run(plan, inputs, context=context)
        try:
            if context.rank == 0:
                describe(run, planned=planned)
            yield run, choose_hooks(config, inputs.tokenizer, planned=peak)
        finally:
            run.batches.close()


def describe(run: Run, *, planned: MemoryPlan | None) -> None:
    """Write the configuration of the run and facts about it into its folder, and log its header."""
    config, inputs, context = run.config, run.inputs, run.context
    name = device_name(context.device)
    world_size, shape, text = context.topology.world_size, run.plan.shape, to_yaml(config)
    facts = {
        "device": name,
        "world_size": world_size,
        "layout": _layout(run.plan, name),
        "parameters": num_parameters(shape),
        "active_parameters": num_active_parameters(shape),
        "memory": asdict(planned) if planned else None,
        "origins": dict(inputs.origins),
    }
    inputs.folder.add_start(text, step=run.state.step, world_size=world_size)
    inputs.folder.write_description(text, facts, secret=config.train.notify)
    keep_tokenizer(inputs, config.checkpoint.pretrained_checkpoint)
    width = max(shutil.get_terminal_size().columns if sys.stderr.isatty() else MAX_WIDTH, MIN_WIDTH)
    attention = str(AttentionChoice.of(config, AttentionDevice.of(context.device)))
    log.info("%s", header(run.plan, inputs, device=name, attention=attention, width=width))
    if inputs.is_resumed:
        log.info("resuming; --no-auto-resume starts a new run")
    done, steps = run.state.step, config.train.train_iters
    if steps == 0:
        log.info("--train-iters 0: everything is built, nothing is trained")
    elif done >= steps:
        log.info(
            "nothing to do: step %d of %d is done; a larger --train-iters goes on from there",
            done,
            steps,
        )


def keep_tokenizer(inputs: RunInputs, pretrained: str | None) -> None:
    """Copy the tokenizer into the run folder, where generation, evaluation and exports find it from
    everywhere.

    Args:
        inputs: open inputs of the run.
        pretrained: the Hugging Face folder with the initial weights, whose tokenizer is taken where
            the run's is the same or unknown.

    Raises:
        EnvironmentFault: the folder cannot be written, or holds files that are not nanotrain's.
    """
    name, folder = inputs.tokenizer, inputs.folder.tokenizer
    if pretrained is not None:
        # few runs need Hugging Face's families
        from nanotrain.interop.hf.companions import fullest_tokenizer

        name = fullest_tokenizer(name, Path(pretrained))
    if name is None or folder in (Path(name), Path(name).parent):
        return
    try:
        tokenizer = load_with_files(name)
    except DataError as error:  # steps need none
        log.info("the run folder gets no tokenizer: %s", error)
        return
    remove_folder(folder)
    make_folder(folder, fix=f"{OTHER_FOLDER}, or move its content")
    with disk_errors(folder):
        tokenizer.save(folder)


def require_same_start(plan: Plan, inputs: RunInputs, *, context: ParallelContext) -> RunInputs:
    """Check that all ranks have the same configuration and start from the same checkpoint.

    Each machine opens its own inputs; if their files differ, the collectives of the ranks would not
    match.

    Returns:
        The inputs with the first rank's checkpoint, also on ranks that have not read one.

    Raises:
        EnvironmentFault: ranks differ; on every rank.
    """
    checkpoint = inputs.checkpoint.name if inputs.checkpoint else "no checkpoint"
    start = checkpoint if inputs.reads_checkpoint else None, zlib.crc32(repr(plan.config).encode())

    def merge(gathered: list[tuple[str | None, int, Path | None]]) -> Path | None:
        """The checkpoint of the first rank, after a check that all ranks start from it; runs on the
        first rank.
        """
        (first_name, first_config, first), *_ = gathered
        for rank, (name, config, _) in enumerate(gathered):
            if (name or first_name) != first_name:
                raise EnvironmentFault(
                    f"rank 0 starts from {first_name}, rank {rank} from {name}",
                    why=f"their machines have different files in {inputs.folder.path} or behind --load",
                    fix="put them on a file system that all machines share",
                )
            if config != first_config:
                raise EnvironmentFault(
                    f"rank {rank} has a different configuration from rank 0",
                    why="all ranks must run the same command line on the same files",
                    fix="compare the output of `nanotrain config` on both machines",
                )
        return first

    # Only the first rank receives the values of all ranks, so the cost of the others does not grow
    # with the world.
    first = run_on_all(context.control, lambda: (*start, inputs.checkpoint), merge=merge)
    return replace(
        inputs,
        checkpoint=first,
        is_resumed=first is not None and plan.config.checkpoint.load is None,
    )


def choose_hooks(
    config: Config, tokenizer: str | None, *, planned: PlannedPeak | None = None
) -> list[Hook]:
    """The hooks of a run in call order; validation comes before logging, which reports its loss."""
    train, later_timeout_s = config.train, config.parallel.distributed_timeout_seconds_after_init
    hooks: list[tuple[bool, Hook]] = [
        (later_timeout_s is not None, TimeoutHook(later_timeout_s or 0.0)),
        (config.evaluates, EvaluateHook(tokenizer)),
        # before the log, which has the times
        (train.timing_log_level > 0 or train.profile, TimersHook()),
        (True, LogHook()),
        (not config.data.mock_data, DataOrderHook()),
        (train.debug_nan, DebugNanHook()),
        (train.check_weight_hash_across_dp_replicas_interval > 0, ReplicasHook()),
        (any(getattr(train, name) for name in TRACKERS), TrackHook()),
        (config.checkpoint.save, CheckpointHook()),
        (train.profile, ProfileHook()),
        (train.generate_tokens > 0, SampleHook(tokenizer)),
        (train.report, ReportHook()),
        (train.notify is not None, NotifyHook()),
        (is_address(train.run_dir or ""), UploadHook()),
        (True, SummaryHook(planned)),
    ]
    return [hook for is_enabled, hook in hooks if is_enabled]


HOST_ALLOCATOR = "can't allocate memory"  # in a plain RuntimeError
NOT_DETERMINISTIC = "does not have a deterministic implementation"  # as well


@contextmanager
def explaining_memory_errors(rank_text: str) -> Iterator[None]:
    """Raise errors of allocators, and of `--deterministic-mode`, as one message; all others pass.

    Args:
        rank_text: names this rank, as "rank 1 (dp1)".
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError is a RuntimeError
        reason = str(error) or type(error).__name__
        if NOT_DETERMINISTIC in reason:
            what, why = "--deterministic-mode cannot be kept", reason.partition(",")[0]
            raise EnvironmentFault(
                what, why=why, fix="leave it out, or what needs this operator"
            ) from error
        if (
            not isinstance(error, MemoryError | torch.OutOfMemoryError)
            and HOST_ALLOCATOR not in reason
        ):
            raise
        raise LocalFault(
            f"{rank_text} ran out of memory",
            why=reason.splitlines()[0],
            fix="lower --micro-batch-size, or shard or recompute more (docs/troubleshooting.md); "
            "the same command resumes from the newest checkpoint",
        ) from error


def header(
    plan: Plan, inputs: RunInputs, *, device: str, attention: str = "", width: int = 1000
) -> str:
    """The lines of the header, each with a label.

    Args:
        plan: plan of any rank.
        inputs: open inputs of the run.
        device: name of the device of this rank.
        attention: the attention backends.
        width: columns; longer lines are wrapped at spaces, commands are not.
    """
    lines = {
        "model": _model(plan),
        "data": _data(plan, inputs),
        "batch": _batch(plan),
        "lr": _warmup(plan),
        "layout": _layout(plan, device),
        "precision": _precision(plan),
        "attention": attention,
        "memory": describe_activations(plan.config),
        "run folder": str(inputs.folder.path),
    }
    wrapped = TextWrapper(
        width, subsequent_indent=" " * 12, break_long_words=False, break_on_hyphens=False
    )
    text = [wrapped.fill(f"{label:<10}  {text}") for label, text in lines.items() if text]
    return "\n".join(
        [*text, *(f"{label:<10}  {command}" for label, command in _commands(plan, inputs).items())]
    )


def _model(plan: Plan) -> str:
    shape = plan.shape
    total, active = num_parameters(shape), num_active_parameters(shape)
    experts = f" ({describe_count(active)} active per token)" if active < total else ""
    sizes = f"{count_of(shape.num_layers, 'layer')}, hidden size {shape.hidden_size:,}, vocabulary {shape.vocab_size:,}"
    return f"{describe_count(total)} parameters{experts}, {sizes}"


def _data(plan: Plan, inputs: RunInputs) -> str:
    config, samples = plan.config, inputs.datasets.train
    steps, read = config.train.train_iters, plan.samples_of(config.train.train_iters)
    tokens = f"{describe_count(read * config.data.seq_length)} tokens in {count_of(steps, 'step')}"
    if samples is None or config.data.mock_data:
        return f"synthetic, {tokens}"
    epoch = samples.samples_per_epoch
    corpus = f"{describe_count(epoch * config.data.seq_length)} tokens"
    texts = [f"{corpus}; this run reads {tokens}, {read / epoch:.2f} epochs"]
    for stage in read_stages(config.data.stages):
        unit = "sample" if stage.in_samples else "step"
        until = "" if stage.end is None else f", changing until {stage.end:,}"
        texts.append(f"{stage.name} from {unit} {stage.start:,}{until}: {stage.blend}")
    texts += _ids_outside(plan)
    if config.train.eval_interval and config.train.eval_iters and not config.validates:
        texts.append(f"no validation, --split {config.data.split} leaves no documents for it")
    return "; ".join(texts)


def _ids_outside(plan: Plan) -> list[str]:
    """A remark on corpora whose tokenizer has more tokens than the model."""
    limit = plan.shape.vocab_size
    prefixes = [entry.prefix for entry in parse_data_path(first_blend(plan.config.data))]
    sizes = {prefix: read_info(prefix).vocab_size for prefix in prefixes}
    return [
        f"the tokenizer of {prefix} has {size:,} tokens, the model {limit:,}: a higher id ends the run"
        for prefix, size in sizes.items()
        if size > limit
    ]


def _warmup(plan: Plan) -> str:
    """A remark if the warmup is longer than the run, for example when a recipe is tried for a few
    steps; else "".
    """
    size, steps, optim = (
        plan.sampler.global_batch_size,
        plan.config.train.train_iters,
        plan.config.optim,
    )
    samples = plan.samples_of(steps)
    schedule = LRSchedule(optim, samples_per_step=size, train_samples=samples)
    if not 0 < samples < schedule.warmup_samples:
        return ""
    last, warmup = schedule.lr_at(plan.samples_of(steps - 1)), schedule.warmup_samples / size
    return f"at most {last:.2e} of {optim.lr:.2e}: the run ends within the warmup of {count_of(round(warmup), 'step')}"


def _batch(plan: Plan) -> str:
    train, sampler, length = plan.config.train, plan.sampler, plan.config.data.seq_length
    lengths = sampler.lengths.sizes[:-1] if sampler.lengths else ()
    split = (
        f", split at first into sequences of {', then '.join(f'{size:,}' for size in lengths)}"
        if lengths
        else ""
    )
    microbatches = count_of(sampler.num_microbatches, "microbatch")
    parts = f"{sampler.dp_size} data-parallel x {microbatches} x {train.micro_batch_size}"
    size, padded = sampler.global_batch_size, sampler.num_padded
    grows = f"from {sampler.size_at(0):,} to " if sampler.schedule else ""
    waste = f" ({padded / (size + padded):.1%} of them padding)" if padded else ""
    samples = f"{grows}{count_of(size, 'sample')} of {count_of(length, 'token')}{split}"
    return f"{samples} = {parts}{waste}; {describe_count(size * length)} tokens per step"


def _layout(plan: Plan, device: str) -> str:
    topology, parallel = plan.topology, plan.config.parallel
    sizes = {axis: topology.size(axis) for axis in ("tp", "cp", "pp")}
    if plan.config.model.moe is not None:
        sizes |= {axis: topology.size(axis) for axis in ("ep", "etp")}
    sizes["dp"] = parallel.data_parallel_size(topology.world_size)
    shown = [f"{axis} {size}" for axis, size in sizes.items() if size > 1]
    if topology.size("pp") > 1:
        shown.append(f"schedule {parallel.pipeline_schedule}")
    if parallel.pipeline_model_parallel_layout and moves_mtp_layers(
        parallel.pipeline_model_parallel_layout
    ):
        shown.append(
            "multi-token prediction on the last stage, with the head (m of the layout is before it)"
        )
    return ", ".join(
        [
            f"{count_of(topology.world_size, 'rank')} on {device}",
            *shown,
            parallel.data_parallel_sharding_strategy,
        ]
    )


def _precision(plan: Plan) -> str:
    precision = plan.config.precision
    params = precision.params_dtype
    main, first, second = (
        precision.main_params_dtype,
        precision.exp_avg_dtype,
        precision.exp_avg_sq_dtype,
    )
    text = "fp32" if params == "fp32" else f"{params}, main params and optimizer in fp32"
    if {main, first, second} != {"fp32"}:
        moments = first if first == second else f"{first} and {second}"
        text = f"{params}, main params in {main}, moments in {moments}"
    if precision.main_grads_dtype != "fp32":
        text = f"{text}, main grads in {precision.main_grads_dtype}"
    if precision.fp8 is None:
        return text
    return f"{text}, linear layers in fp8 ({precision.fp8.format}, {precision.fp8.recipe})"


def _commands(plan: Plan, inputs: RunInputs) -> dict[str, str]:
    """Commands that show the running job, by label; each is one line, so that it can be copied."""
    train, path = plan.config.train, inputs.folder.path
    commands = {"watch": f"nanotrain watch {path}"}
    if train.tensorboard:
        commands["curves"] = f"tensorboard --logdir {train.tensorboard_dir or path / 'tensorboard'}"
    return commands
