"""Shrink a configuration to a model for a few CPU processes, of the same structure and layout.

    unchanged  layout, sharding strategy, overlap, schedule; norms, activation, biases, tied
               embeddings, positions, kind of attention, query heads per key/value head, routing,
               kinds of layers; update rule and options; seed; recomputation, which one rank does
               without
    shrunk     layers (two per stage), heads, widths, experts, sequence, vocabulary: the smallest
               sizes that the layout divides, with several heads and experts on every rank;
               schedules of batch size and sequence length, which change after the first step
    replaced   fp32 on the CPU; no clipping, warmup or decay, so that a wrong gradient affects only
               its own parameter and every step updates; Adam's epsilon above the rounding of a
               gradient; initial weights scaled to the small width; random tokens
    left out   settings of left_out.yaml, with the reasons; a report names those that are set

Every rule is a pure function of the configuration, so a report can be reproduced.
"""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from itertools import chain
from math import ceil, gcd, lcm
from pathlib import Path
from typing import Any

from nanotrain.config.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    OptimConfig,
    PrecisionConfig,
    TrainConfig,
)
from nanotrain.config.model import CompressedAttentionConfig, DSAConfig, ModelConfig, MoEConfig
from nanotrain.config.mup import width_multiplier
from nanotrain.config.optim import MUON_OPTIMIZERS
from nanotrain.config.parallel import MemoryConfig, ParallelConfig
from nanotrain.config.rules.check import check_layout, check_model
from nanotrain.config.schema import ENTRIES, KEYS, flat_values, value_of, with_values
from nanotrain.config.tables import read_table
from nanotrain.errors import ConfigError
from nanotrain.parity.layers import shrink_layers
from nanotrain.parity.patterns import shrink_letters, shrink_pattern
from nanotrain.quantities import round_up

VOCAB_SIZE = 203  # not a multiple of 128, so the vocabulary is padded
MIN_SEQ_LENGTH = 24
BUCKET_SIZE = 5000  # elements, so that a stage has several buckets
LEARNING_RATE = 1e-3
# Adam divides by the size of the gradient: an element whose gradient is only rounding (4e-8 among
# 1e-1) moves by the full learning rate in either direction, which changed the next loss by 1e-5
# (observed). This epsilon reduces it to 1%.
MIN_ADAM_EPS = 1e-5
# in fp16; the adaptive scale begins so high that it skips the first steps
LOSS_SCALE = 1024.0
# threshold of QK-clip, so that it acts: initial logits have a standard deviation of about 1
MAX_ATTENTION_LOGIT = 1.0


def _read_left_out() -> dict[str, list[str]]:
    """Keys of fields that the small run leaves out, by reason; a section stands for its fields."""
    table = {}
    for reason, names in read_table("left_out", folder=Path(__file__).parent).items():
        keys: list[str] = []
        for name in names:
            keys += [key for key in KEYS if key == name or key.startswith(f"{name}.")]
        table[reason] = keys
    return table


LEFT_OUT = _read_left_out()
# sizes of the small model by kind of layer
SIZES: dict[str, dict[str, Any]] = read_table("sizes", folder=Path(__file__).parent)


def shrink(
    config: Config,
    world_size: int,
    *,
    num_steps: int,
    keeps_precision: bool = False,
    layers_per_stage: int = 2,
) -> Config:
    """Shrink a valid configuration to the smallest model of its structure and layout.

    Args:
        config: the full configuration.
        world_size: ranks of the layout.
        num_steps: number of optimizer steps.
        keeps_precision: whether dtypes stay as configured; else all numbers are fp32.
        layers_per_stage: layers of a pipeline stage, plus one if they were uneven.

    Raises:
        TopologyError: the layout does not fit the ranks.
    """
    dp = config.parallel.data_parallel_size(world_size)
    # the shortest sequence that cp (two chunks per rank) and tp divide
    tp = config.parallel.tensor_model_parallel_size
    seq_unit = config.parallel.context_parallel_size * lcm(2, tp)
    if config.train.step_seq_length_schedule:
        seq_unit *= 2  # half of it is a length too
    seq_length = round_up(MIN_SEQ_LENGTH, seq_unit)
    num_layers, parallel = shrink_layers(
        config.model.num_layers, config.parallel, per_stage=layers_per_stage
    )
    data = DataConfig(
        seq_length=seq_length,
        num_workers=0,
        reset_position_ids=config.data.reset_position_ids,
        reset_attention_mask=config.data.reset_attention_mask,
        eod_mask_loss=config.data.eod_mask_loss,
    )
    train = TrainConfig(
        train_iters=num_steps,
        seed=config.train.seed,
        device="cpu",
        eval_interval=0,
        **shrink_batches(config, dp=dp, seq_length=seq_length),
    )
    small = Config(
        model=shrink_model(config, seq_length, num_layers=num_layers),
        parallel=replace(parallel, ddp_bucket_size=BUCKET_SIZE),
        memory=shrink_memory(config.memory, config.parallel, num_layers=num_layers),
        precision=shrink_precision(config.precision) if keeps_precision else PrecisionConfig(),
        optim=shrink_optim(config.optim),
        data=data,
        checkpoint=CheckpointConfig(save=False),
        train=train,
    )
    return shrink_sizes(small)


def shrink_batches(config: Config, *, dp: int, seq_length: int) -> dict[str, Any]:
    """Fields of the train section: sizes of batches and their schedules.

    Schedules change after the first step. Its batch has one microbatch, all others one more than
    pipeline ranks, at least 2: a steady state of the pipeline. With a schedule of lengths the first
    step has half of the sequence length.
    """
    train = config.train
    micro_batch_size = min(train.micro_batch_size, 2)
    first = micro_batch_size * dp
    final = first * (config.parallel.pipeline_model_parallel_size + 1)
    fields: dict[str, Any] = {"micro_batch_size": micro_batch_size, "global_batch_size": final}
    if train.rampup_batch_size:
        fields["rampup_batch_size"] = [first, final - first, first]
    if train.step_batch_size_schedule:
        fields["step_batch_size_schedule"] = [f"0:{first}", f"{first * seq_length}:{final}"]
    if train.step_seq_length_schedule:
        has_sizes = train.rampup_batch_size or train.step_batch_size_schedule
        change = (first if has_sizes else final) * seq_length
        fields["step_seq_length_schedule"] = [f"0:{seq_length // 2}", f"{change}:{seq_length}"]
    return fields


def shrink_memory(
    memory: MemoryConfig, parallel: ParallelConfig, *, num_layers: int
) -> MemoryConfig:
    """The memory section of a small model: the same recomputation, nothing offloaded."""
    virtual = parallel.num_virtual_stages_per_pipeline_rank
    num_stages = parallel.pipeline_model_parallel_size * virtual
    group = memory.recompute_num_layers
    if group is not None:
        group = min(group, max(1, num_layers // num_stages))
    return replace(
        memory, recompute_num_layers=group, cpu_offloading=False, cpu_offloading_num_layers=0
    )


def shrink_precision(precision: PrecisionConfig) -> PrecisionConfig:
    """The dtypes of a small model: a constant loss scale, and fp8 in its few layers alike."""
    fp8 = precision.fp8
    if fp8 is not None:
        fp8 = replace(fp8, first_last_layers_bf16=False)
    return replace(precision, loss_scale=precision.loss_scale or LOSS_SCALE, fp8=fp8)


def shrink_optim(optim: OptimConfig) -> OptimConfig:
    """The update rule with a constant learning rate, without clipping, and in fp32."""
    fields: dict[str, Any] = {}
    for key in chain.from_iterable(LEFT_OUT.values()):
        section, _, name = key.partition(".")
        if section == "optim":
            fields[name] = getattr(OptimConfig(), name)
    fields |= {"lr": LEARNING_RATE, "lr_decay_style": "constant", "clip_grad": 0.0}
    if optim.decoupled_lr is not None:
        fields["decoupled_lr"] = LEARNING_RATE * optim.decoupled_lr / optim.lr
    if optim.qk_clip:
        fields["qk_clip_threshold"] = min(optim.qk_clip_threshold, MAX_ATTENTION_LOGIT)
    rule = "muon_scalar_optimizer" if optim.optimizer in MUON_OPTIMIZERS else "optimizer"
    if getattr(optim, rule) in ("adam", "lion"):
        fields |= {rule: "adam", "adam_eps": max(optim.adam_eps, MIN_ADAM_EPS)}
    # in bf16 a last bit of a gradient may change an update by some percent
    if optim.optimizer == "adam_h":
        fields["adam_eps"] = max(optim.adam_eps, MIN_ADAM_EPS)
    if optim.optimizer in MUON_OPTIMIZERS:
        fields["muon_fp32_matmul_prec"] = "highest"
    return replace(optim, **fields)


def on_one_rank(config: Config) -> Config:
    """A shrunk configuration for one rank with the same samples, without recomputation.

    With global_aux_loss it has as many microbatches, whose counts that loss averages.
    """
    train = config.train
    moe = config.model.moe
    parallel = ParallelConfig(ddp_bucket_size=config.parallel.ddp_bucket_size)
    has_global_loss = moe is not None and "global_aux_loss" in moe.router_load_balancing_type
    if has_global_loss and train.global_batch_size:
        num_microbatches = config.parallel.pipeline_model_parallel_size + 1  # see `shrink_batches`
        train = replace(train, micro_batch_size=train.global_batch_size // num_microbatches)
    return replace(config, parallel=parallel, memory=MemoryConfig(), train=train)


def left_out(config: Config) -> tuple[str, ...]:
    """The settings that the small run leaves out, by reason: "clip_grad, lr_decay_style: reason".

    >>> optim = OptimConfig(clip_grad=0.0)
    >>> left_out(replace(Config(), optim=optim, data=DataConfig(shuffle=False)))
    ('shuffle: samples are random tokens',)
    """
    values = flat_values(config)
    defaults = flat_values(replace(Config(), optim=OptimConfig(clip_grad=0.0)))
    lines = []
    for reason, keys in LEFT_OUT.items():
        names = [key.rpartition(".")[2] for key in keys if values[key] != defaults[key]]
        if names:
            lines.append(f"{', '.join(names)}: {reason}")
    if config.model.moe is not None and _has_two_balance_losses(config.model.moe):
        lines.append(
            "aux_loss: one rank cannot balance microbatches of a rank and, "
            "for global_aux_loss, of all ranks"
        )
    if "lion" in (config.optim.optimizer, config.optim.muon_scalar_optimizer):
        lines.append(
            "lion: its sign of a gradient that is only rounding moves a weight "
            "by the learning rate; Adam instead"
        )
    return tuple(lines)


def _has_two_balance_losses(moe: MoEConfig) -> bool:
    """Whether the model has both a per-rank and a global balance loss."""
    return {"aux_loss", "global_aux_loss"} <= set(moe.router_load_balancing_type)


def shrink_model(config: Config, seq_length: int, *, num_layers: int) -> ModelConfig:
    """Shrink the model section to a sequence length and a number of layers.

    Heads, experts and widths stay.
    """
    model = config.model
    max_positions = seq_length
    if model.max_position_embeddings > config.data.seq_length:
        max_positions += 8
    third = seq_length // 3
    window_size = model.window_size
    if window_size is not None:
        window_size = min(window_size, third)
        if model.compressed is not None:  # a rank has two chunks, each longer than the window
            chunk = seq_length // (2 * config.parallel.context_parallel_size)
            window_size = min(window_size, chunk - 1)
    chunk_size = model.attention_chunk_size
    if chunk_size:
        chunk_size = min(chunk_size, third)
    floor_scale = model.floor_scale
    if model.attn_scale > 0:
        floor_scale = min(floor_scale, third)
    moe = model.moe
    if moe is not None:
        moe = _shrink_moe(model, moe, num_layers=num_layers)
    pattern = partial(shrink_pattern, num_layers=num_layers)
    is_linear = tuple(mixer == model.linear_attention_type for mixer in model.mixers)
    smaller = replace(
        model,
        num_layers=num_layers,
        window_size=window_size,
        attention_chunk_size=chunk_size,
        floor_scale=floor_scale,
        window_attn_skip_freq=pattern(model.window_attn_skip_freq, model.window_layers),
        no_rope_freq=pattern(model.no_rope_freq, model.no_rope_layers),
        hybrid_layer_pattern=shrink_letters(model.hybrid_layer_pattern, num_layers=num_layers),
        linear_attention_freq=pattern(model.linear_attention_freq, is_linear),
        max_position_embeddings=max_positions,
        vocab_size=VOCAB_SIZE,
        make_vocab_size_divisible_by=_vocabulary_multiple(config),
        moe=moe,
        dsa=_shrink_dsa(model, num_layers=num_layers),
        compressed=_shrink_compressed(model, num_layers=num_layers),
        num_kv_shared_layers=min(model.num_kv_shared_layers, num_layers - 1),
    )
    return with_sources(smaller)


def _shrink_dsa(model: ModelConfig, *, num_layers: int) -> DSAConfig | None:
    """The indexers of a smaller model: where layers share, the first has one for all others."""
    if model.dsa is None or not any(model.shared_selections):
        return model.dsa
    return replace(model.dsa, share_freq=f"[0]+[1]*{num_layers - 1}")


def _shrink_compressed(model: ModelConfig, *, num_layers: int) -> CompressedAttentionConfig | None:
    """The section of compressed attention with the letters of a smaller model."""
    if model.compressed is None:
        return None
    letters = shrink_letters(model.compressed_pattern, num_layers=num_layers)
    return replace(model.compressed, layer_pattern=letters)


def with_sources(model: ModelConfig) -> ModelConfig:
    """The model without layers that read keys of earlier layers and have none to read from.

    >>> with_sources(ModelConfig(num_layers=4, num_kv_shared_layers=3)).num_kv_shared_layers
    3
    >>> model = ModelConfig(num_layers=4, window_size=2, window_attn_skip_freq="2")
    >>> with_sources(replace(model, num_kv_shared_layers=3)).num_kv_shared_layers
    2
    """
    while model.num_kv_shared_layers > 0:
        first = model.num_layers - model.num_kv_shared_layers
        if all(layer < first for layer in model.unshared_layers):
            return model
        model = replace(model, num_kv_shared_layers=model.num_kv_shared_layers - 1)
    return replace(model, use_double_wide_mlp=False)


def _vocabulary_multiple(config: Config) -> int:
    """The multiple to which the vocabulary is padded, if it is small and tp divides it."""
    multiple = config.model.make_vocab_size_divisible_by
    tp = config.parallel.tensor_model_parallel_size
    return multiple if multiple <= 128 and multiple % tp == 0 else lcm(16, tp)


def _shrink_moe(model: ModelConfig, moe: MoEConfig, *, num_layers: int) -> MoEConfig:
    """The section of experts for fewer layers, with one balance loss at most."""
    coeffs = dict(zip(moe.router_load_balancing_type, moe.aux_loss_coeff, strict=True))
    if _has_two_balance_losses(moe):
        del coeffs["aux_loss"]
    return replace(
        moe,
        layer_freq=shrink_pattern(moe.layer_freq, model.moe_layers, num_layers=num_layers),
        hash_layers=shrink_pattern(moe.hash_layers, model.hash_layers, num_layers=num_layers),
        router_load_balancing_type=list(coeffs),
        aux_loss_coeff=list(coeffs.values()),
        divide_global_aux_loss_by_dp=False,
    )


def shrink_sizes(config: Config) -> Config:
    """Shrink heads, experts and widths, by the rows of sizes.yaml for the model's layer kinds."""
    kinds = _layer_kinds(config.model)
    if "mamba2" in kinds or "attention_mamba2" in kinds:
        # unset, their number follows from the hidden size
        config = with_values(config, {"model.mamba.num_heads": config.model.mamba_heads})
    values: dict[str, Any] = {}
    for kind in kinds:
        row = SIZES.get(kind or "", {})
        config = divide(config, row.get("divided", ()))
        values |= row.get("set", {})
    values |= _widths(config)
    by_key = {ENTRIES[name].key: value for name, value in values.items()}
    by_key = {key: value for key, value in by_key.items() if value_of(config, key) is not None}
    if "dense" in kinds or not _has_expert_width(config.model):
        tp = config.parallel.tensor_model_parallel_size
        etp = config.parallel.expert_tensor_parallel_size or 1
        by_key["model.ffn_hidden_size"] = round_up(2 * values["hidden_size"], 4 * lcm(tp, etp))
    return _with_fewer_factors(with_values(config, by_key))


def _with_fewer_factors(config: Config) -> Config:
    """LongRoPE's factors of the pairs that the small heads rotate."""
    longrope = config.model.longrope
    if longrope is None:
        return config
    num_pairs = config.model.rotary_dim // 2
    factors = {
        "model.longrope.short_factor": longrope.short_factor[:num_pairs],
        "model.longrope.long_factor": longrope.long_factor[:num_pairs],
    }
    return with_values(config, factors)


def _has_expert_width(model: ModelConfig) -> bool:
    """Whether experts have a width of their own."""
    return model.moe is not None and model.moe.ffn_hidden_size is not None


def _layer_kinds(model: ModelConfig) -> list[str | None]:
    """Kinds of the layers of a model, softmax attention first; None for half layers."""
    softmax = ["attention"] if model.mla is None else ["attention", "mla"]
    return list(dict.fromkeys([*softmax, *model.mixers, *model.mlps]))


def _widths(config: Config) -> dict[str, Any]:
    """Widths of the small model by the name of their setting."""
    model = config.model
    tp = config.parallel.tensor_model_parallel_size
    expert_tp = config.parallel.expert_tensor_parallel_size or tp
    channels = _head_channels(model)
    hidden = 48
    if not model.mla:
        hidden = model.num_attention_heads * channels
        if model.kv_channels is not None:
            hidden += 8
    return {
        "hidden_size": hidden,
        "init_method_std": hidden**-0.5,
        "mup_base_hidden_size": max(1, round(hidden / width_multiplier(model))),
        "kv_channels": channels,
        "moe_latent_size": hidden // 2,
        # every rank gets a multiple of 4: rows of 16 bytes in fp32
        "moe_ffn_hidden_size": round_up(hidden, 4 * expert_tp),
        "moe_shared_expert_intermediate_size": round_up(hidden, 4 * tp),
    }


def _head_channels(model: ModelConfig) -> int:
    """Channels of a head: RoPE rotates pairs, and grouped products need multiples of 4."""
    for channels in range(4 * ceil(8 / model.num_attention_heads), 16, 4):
        if int(channels * model.rotary_percent) in range(2, 16, 2):
            return channels
    return 16


def divide(config: Config, names: Iterable[str]) -> Config:
    """Divide sizes by one divisor, the largest that the rules allow.

    A rank keeps two heads of each kind if it had as many, and a model twice as many experts as a
    token is routed to.
    """
    sizes = {}
    for name in names:
        key = ENTRIES[name].key
        size = value_of(config, key)
        if size is not None:
            sizes[key] = size
    least = _least_size(config, names)
    largest = gcd(*sizes.values())
    for divisor in range(largest, 1, -1):
        if largest % divisor:
            continue
        small_sizes = {key: size // divisor for key, size in sizes.items()}
        if any(small_sizes[key] < min(sizes[key], least) for key in sizes):
            continue
        small = with_values(config, small_sizes)
        try:
            check_model(small)
            check_layout(small)
        except ConfigError:
            continue
        return small
    return config


def _least_size(config: Config, names: Iterable[str]) -> int:
    """The least number of heads, or of experts."""
    parallel = config.parallel
    moe = config.model.moe
    if "num_experts" in names and moe is not None:
        return max(8, 2 * moe.router_topk, 2 * parallel.expert_model_parallel_size)
    unit = parallel.tensor_model_parallel_size
    unit *= parallel.all_to_all_ranks
    return 2 * unit
