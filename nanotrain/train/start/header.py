"""The header printed before the first step: model, data, batch, layout, precision, run folder."""

from textwrap import TextWrapper

from nanotrain.config.batch_schedule import samples_of_steps
from nanotrain.config.data_stages import read_stages
from nanotrain.config.derive import data_parallel_size, validates
from nanotrain.config.pipeline_layout import moves_mtp_layers
from nanotrain.data.build import first_blend
from nanotrain.data.corpus_info import read_info
from nanotrain.data.data_path import parse_data_path
from nanotrain.memory.block_transforms import describe_activations
from nanotrain.optim.lr import LRSchedule
from nanotrain.quantities import count_of, describe_count
from nanotrain.spec.counts import num_active_parameters, num_parameters
from nanotrain.train.plans.plan import Plan
from nanotrain.train.run import RunInputs


def header(plan: Plan, inputs: RunInputs, *, device: str, attention: str = "", width: int = 1000) -> str:
    """The lines of the header, each with a label.

    Args:
        plan: of any rank.
        inputs: of the run.
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
    wrapped = TextWrapper(width, subsequent_indent=" " * 12, break_long_words=False, break_on_hyphens=False)
    text = [wrapped.fill(f"{label:<10}  {text}") for label, text in lines.items() if text]
    return "\n".join([*text, *(f"{label:<10}  {command}" for label, command in _commands(plan, inputs).items())])


def _model(plan: Plan) -> str:
    shape = plan.shape
    total, active = num_parameters(shape), num_active_parameters(shape)
    experts = f" ({describe_count(active)} active per token)" if active < total else ""
    sizes = f"{count_of(shape.num_layers, 'layer')}, hidden size {shape.hidden_size:,}, vocabulary {shape.vocab_size:,}"
    return f"{describe_count(total)} parameters{experts}, {sizes}"


def _data(plan: Plan, inputs: RunInputs) -> str:
    config, samples = plan.config, inputs.datasets.train
    steps, read = config.train.train_iters, _samples(plan, config.train.train_iters)
    tokens = f"{describe_count(read * config.data.seq_length)} tokens in {count_of(steps, 'step')}"
    if samples is None or config.data.mock_data:
        return f"synthetic, {tokens}"
    epoch = samples.samples_per_epoch
    texts = [
        f"{describe_count(epoch * config.data.seq_length)} tokens; this run reads {tokens}, {read / epoch:.2f} epochs"
    ]
    for stage in read_stages(config.data.stages):
        unit = "sample" if stage.in_samples else "step"
        texts.append(f"{stage.name} from {unit} {stage.start:,}: {stage.blend}")
    texts += _ids_outside(plan)
    if config.train.eval_interval and config.train.eval_iters and not validates(config):
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


def _samples(plan: Plan, steps: int) -> int:
    """Samples of the first steps of the run."""
    schedule = plan.sampler.schedule
    return samples_of_steps(schedule, steps) if schedule else steps * plan.sampler.global_batch_size


def _warmup(plan: Plan) -> str:
    """A remark if the warmup is longer than the run, for example when a recipe is tried for a few steps; else ""."""
    size, steps, optim = plan.sampler.global_batch_size, plan.config.train.train_iters, plan.config.optim
    samples = _samples(plan, steps)
    schedule = LRSchedule(optim, samples_per_step=size, train_samples=samples)
    if not 0 < samples < schedule.warmup_samples:
        return ""
    last, warmup = schedule.lr_at(_samples(plan, steps - 1)), schedule.warmup_samples / size
    return f"at most {last:.2e} of {optim.lr:.2e}: the run ends within the warmup of {count_of(round(warmup), 'step')}"


def _batch(plan: Plan) -> str:
    train, sampler, length = plan.config.train, plan.sampler, plan.config.data.seq_length
    lengths = sampler.lengths.sizes[:-1] if sampler.lengths else ()
    split = f", split at first into sequences of {', then '.join(f'{size:,}' for size in lengths)}" if lengths else ""
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
    sizes["dp"] = data_parallel_size(parallel, topology.world_size)
    shown = [f"{axis} {size}" for axis, size in sizes.items() if size > 1]
    if topology.size("pp") > 1:
        shown.append(f"schedule {parallel.pipeline_schedule}")
    if parallel.pipeline_model_parallel_layout and moves_mtp_layers(parallel.pipeline_model_parallel_layout):
        shown.append("multi-token prediction on the last stage, with the head (m of the layout is before it)")
    return ", ".join(
        [f"{count_of(topology.world_size, 'rank')} on {device}", *shown, parallel.data_parallel_sharding_strategy.value]
    )


def _precision(plan: Plan) -> str:
    precision = plan.config.precision
    params = precision.params_dtype.value
    main, first, second = (
        dtype.value for dtype in (precision.main_params_dtype, precision.exp_avg_dtype, precision.exp_avg_sq_dtype)
    )
    text = "fp32" if params == "fp32" else f"{params}, main params and optimizer in fp32"
    if {main, first, second} != {"fp32"}:
        moments = first if first == second else f"{first} and {second}"
        text = f"{params}, main params in {main}, moments in {moments}"
    if precision.main_grads_dtype.value != "fp32":
        text = f"{text}, main grads in {precision.main_grads_dtype.value}"
    if precision.fp8 is None:
        return text
    return f"{text}, linear layers in fp8 ({precision.fp8.format.value}, {precision.fp8.recipe})"


def _commands(plan: Plan, inputs: RunInputs) -> dict[str, str]:
    """Commands that show the running job, by label; each is one line, so that it can be copied."""
    train, path = plan.config.train, inputs.folder.path
    commands = {"watch": f"nanotrain watch {path}"}
    if train.tensorboard:
        commands["curves"] = f"tensorboard --logdir {train.tensorboard_dir or path / 'tensorboard'}"
    return commands
