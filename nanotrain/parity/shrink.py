"""Shrink a configuration: the same structure and layout in a model small enough for a few CPU
processes.

    unchanged  layout, sharding strategy, overlap, schedule; norms, activation, biases, tied embeddings, positions, kind
               of attention, query heads per key/value head, routing, kinds of layers; update rule and options; seed;
               recomputation, which one rank does without
    shrunk     layers (two per stage), heads, widths, experts, sequence, vocabulary: the smallest sizes that the layout
               divides, with several heads and experts on every rank; schedules of batch size and sequence length, which
               change after the first step
    replaced   fp32 on the CPU; no clipping, warmup or decay, so that a wrong gradient affects only its own parameter
               and every step updates; Adam's epsilon above the rounding of a gradient; initial weights scaled to the
               small width; random tokens
    left out   what left_out.yaml lists, with the reasons; a report names those that are set

Every rule is a pure function of the configuration, so a report can be reproduced.
"""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from math import gcd, lcm
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
from nanotrain.config.model import ModelConfig, MoEConfig
from nanotrain.config.notation import read_pipeline_layout, write_pipeline_layout
from nanotrain.config.parallel import MemoryConfig, ParallelConfig
from nanotrain.config.rules.check import check_layout, check_model
from nanotrain.config.schema import ENTRIES, KEYS, flat_values, value_of, with_values
from nanotrain.config.tables import read_table
from nanotrain.errors import ConfigError
from nanotrain.quantities import round_up

VOCAB_SIZE = 203  # not a multiple of 128, so the vocabulary is padded
MIN_SEQ_LENGTH = 24
BUCKET_SIZE = 5000  # elements, so that a stage has several buckets
LEARNING_RATE = 1e-3
# Adam divides by the size of the gradient: an element whose gradient is only rounding (4e-8 among
# 1e-1) moves by the full learning rate in either direction, which changed the next loss by 1e-5
# (observed). This epsilon reduces it to 1%.
MIN_ADAM_EPS = 1e-5
# of QK-clip, so that it acts: initial logits have a standard deviation of about 1
MAX_ATTENTION_LOGIT = 1.0
# fields that the small run leaves out, by reason
LEFT_OUT: dict[str, list[str]] = {
    reason: [key for name in names for key in KEYS if key == name or key.startswith(f"{name}.")]
    for reason, names in read_table("left_out", folder=Path(__file__).parent).items()
}
# by kind of layer
SIZES: dict[str, dict[str, Any]] = read_table("sizes", folder=Path(__file__).parent)


def shrink(config: Config, world_size: int, *, num_steps: int) -> Config:
    """Shrink a valid configuration, its vocabulary size set or not, to the smallest model of its
    structure and layout.

    Raises:
        TopologyError: the layout does not fit the ranks.
    """
    dp = config.parallel.data_parallel_size(world_size)
    # the shortest sequence that cp (two chunks per rank) and tp divide
    seq_unit = config.parallel.context_parallel_size * lcm(
        2, config.parallel.tensor_model_parallel_size
    )
    if config.train.step_seq_length_schedule:
        seq_unit *= 2  # half of it is a length too
    seq_length = round_up(MIN_SEQ_LENGTH, seq_unit)
    num_layers, parallel = shrink_layers(config.model.num_layers, config.parallel)
    small = Config(
        model=shrink_model(config, seq_length, num_layers=num_layers),
        parallel=replace(parallel, ddp_bucket_size=BUCKET_SIZE),
        memory=shrink_memory(config.memory, config.parallel, num_layers=num_layers),
        precision=PrecisionConfig(),
        optim=shrink_optim(config.optim),
        data=DataConfig(
            seq_length=seq_length,
            num_workers=0,
            reset_position_ids=config.data.reset_position_ids,
            reset_attention_mask=config.data.reset_attention_mask,
            eod_mask_loss=config.data.eod_mask_loss,
        ),
        checkpoint=CheckpointConfig(save=False),
        train=TrainConfig(
            train_iters=num_steps,
            seed=config.train.seed,
            device="cpu",
            eval_interval=0,
            **shrink_batches(config, dp=dp, seq_length=seq_length),
        ),
    )
    return shrink_sizes(small)


def shrink_batches(config: Config, *, dp: int, seq_length: int) -> dict[str, Any]:
    """Fields of the train section: sizes of batches, and schedules that change after the first
    step.

    The first batch of a schedule has one microbatch, all others one more than pipeline ranks of
    them, at least 2: a steady state of the pipeline. Of a schedule of lengths the first step has
    half of the sequence length.
    """
    train, micro_batch_size = config.train, min(config.train.micro_batch_size, 2)
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
    """The memory section for a small model of `num_layers`: the same recomputation, nothing
    offloaded.
    """
    num_stages = (
        parallel.pipeline_model_parallel_size * parallel.num_virtual_stages_per_pipeline_rank
    )
    group = memory.recompute_num_layers
    if group is not None:
        group = min(group, max(1, num_layers // num_stages))
    return replace(
        memory, recompute_num_layers=group, cpu_offloading=False, cpu_offloading_num_layers=0
    )


def shrink_optim(optim: OptimConfig) -> OptimConfig:
    """The update rule with a constant learning rate, without clipping, and in fp32."""
    left_out = [
        key.removeprefix("optim.")
        for keys in LEFT_OUT.values()
        for key in keys
        if key.startswith("optim.")
    ]
    fields = {name: getattr(OptimConfig(), name) for name in left_out}
    fields |= {"lr": LEARNING_RATE, "lr_decay_style": "constant", "clip_grad": 0.0}
    if optim.decoupled_lr is not None:
        fields["decoupled_lr"] = LEARNING_RATE * optim.decoupled_lr / optim.lr
    if optim.qk_clip:
        fields["qk_clip_threshold"] = min(optim.qk_clip_threshold, MAX_ATTENTION_LOGIT)
    rule = "muon_scalar_optimizer" if optim.optimizer == "muon" else "optimizer"
    if getattr(optim, rule) in ("adam", "lion"):
        fields |= {rule: "adam", "adam_eps": max(optim.adam_eps, MIN_ADAM_EPS)}
    # in bf16 a last bit of a gradient may change an update by some percent
    if optim.optimizer == "muon":
        fields["muon_fp32_matmul_prec"] = "highest"
    return replace(optim, **fields)


def on_one_rank(config: Config) -> Config:
    """A shrunk configuration without parallelism and recomputation: one rank trains on the same
    samples.

    With global_aux_loss it has as many microbatches, whose counts that loss averages.
    """
    train, moe = config.train, config.model.moe
    parallel = ParallelConfig(ddp_bucket_size=config.parallel.ddp_bucket_size)
    if (
        moe is not None
        and "global_aux_loss" in moe.router_load_balancing_type
        and train.global_batch_size
    ):
        num_microbatches = config.parallel.pipeline_model_parallel_size + 1  # see `shrink_batches`
        train = replace(train, micro_batch_size=train.global_batch_size // num_microbatches)
    return replace(config, parallel=parallel, memory=MemoryConfig(), train=train)


def left_out(config: Config) -> tuple[str, ...]:
    """The settings that the small run leaves out, by reason: "clip_grad, lr_decay_style: reason".

    >>> left_out(replace(Config(), optim=OptimConfig(clip_grad=0.0), data=DataConfig(shuffle=False)))
    ('shuffle: samples are random tokens',)
    """
    values, defaults = (
        flat_values(config),
        flat_values(replace(Config(), optim=OptimConfig(clip_grad=0.0))),
    )
    lines = []
    for reason, keys in LEFT_OUT.items():
        names = [key.rpartition(".")[2] for key in keys if values[key] != defaults[key]]
        lines += [f"{', '.join(names)}: {reason}"] if names else []
    if config.model.moe is not None and _balances_two_microbatches(config.model.moe):
        lines.append(
            "aux_loss: one rank cannot balance microbatches of a rank and, for global_aux_loss, of all ranks"
        )
    if "lion" in (config.optim.optimizer, config.optim.muon_scalar_optimizer):
        lines.append(
            "lion: its sign of a gradient that is only rounding moves a weight by the learning rate; Adam instead"
        )
    return tuple(lines)


def _balances_two_microbatches(moe: MoEConfig) -> bool:
    """Whether there is a loss over the microbatch of a rank beside one over that of all ranks."""
    return {"aux_loss", "global_aux_loss"} <= set(moe.router_load_balancing_type)


def shrink_model(config: Config, seq_length: int, *, num_layers: int) -> ModelConfig:
    """Shrink the model section to a sequence length and a number of layers; heads, experts and
    widths stay.
    """
    model_config, moe = config.model, config.model.moe
    has_longer_positions = model_config.max_position_embeddings > config.data.seq_length
    multiple, tp = (
        model_config.make_vocab_size_divisible_by,
        config.parallel.tensor_model_parallel_size,
    )
    pattern = partial(shrink_pattern, num_layers=num_layers)
    chunk, third = model_config.attention_chunk_size, seq_length // 3
    if moe is not None:
        losses = zip(moe.router_load_balancing_type, moe.aux_loss_coeff, strict=True)
        kept = {
            name: coeff
            for name, coeff in losses
            if name != "aux_loss" or not _balances_two_microbatches(moe)
        }
        moe = replace(
            moe,
            layer_freq=pattern(moe.layer_freq, model_config.moe_layers),
            router_load_balancing_type=[*kept],
            aux_loss_coeff=[*kept.values()],
            divide_global_aux_loss_by_dp=False,
        )
    return replace(
        model_config,
        num_layers=num_layers,
        window_size=None
        if model_config.window_size is None
        else min(model_config.window_size, third),
        attention_chunk_size=chunk and min(chunk, third),
        floor_scale=min(model_config.floor_scale, third)
        if model_config.attn_scale > 0
        else model_config.floor_scale,
        window_attn_skip_freq=pattern(
            model_config.window_attn_skip_freq, model_config.window_layers
        ),
        no_rope_freq=pattern(model_config.no_rope_freq, model_config.no_rope_layers),
        hybrid_layer_pattern=shrink_letters(
            model_config.hybrid_layer_pattern, num_layers=num_layers
        ),
        linear_attention_freq=pattern(
            model_config.linear_attention_freq,
            tuple(mixer == model_config.linear_attention_type for mixer in model_config.mixers),
        ),
        max_position_embeddings=seq_length + 8 * has_longer_positions,
        vocab_size=VOCAB_SIZE,
        make_vocab_size_divisible_by=multiple
        if multiple <= 128 and multiple % tp == 0
        else lcm(16, tp),
        moe=moe,
    )


def shrink_sizes(config: Config) -> Config:
    """Shrink heads, experts and widths, by the rows of sizes.yaml for the kinds of layers of the
    model.
    """
    softmax = ("attention",) if config.model.mla is None else ("attention", "mla")
    kinds = dict.fromkeys((*softmax, *config.model.mixers, *config.model.mlps))
    rows = [SIZES[kind] for kind in kinds if kind in SIZES]
    # unset, their number follows from the hidden size
    if {"mamba2", "attention_mamba2"} & kinds.keys():
        config = with_values(config, {"model.mamba.num_heads": config.model.mamba_heads})
    for row in rows:
        config = divide(config, row.get("divided", ()))
    model_config, heads = config.model, config.model.num_attention_heads
    # RoPE rotates pairs; grouped products need multiples of 4
    width, share = 4 * -(-8 // heads), model_config.rotary_percent
    width = next((size for size in range(width, 16, 4) if int(size * share) in range(2, 16, 2)), 16)
    hidden = 48 if model_config.mla else heads * width + 8 * (model_config.kv_channels is not None)
    tp, etp = (
        config.parallel.tensor_model_parallel_size,
        config.parallel.expert_tensor_parallel_size,
    )
    values = {name: size for row in rows for name, size in row.get("set", {}).items()}
    values |= {
        "hidden_size": hidden,
        "init_method_std": hidden**-0.5,
        "kv_channels": width,
        "moe_latent_size": hidden // 2,
    }
    # every rank gets a multiple of 4: rows of 16 bytes in fp32
    values["moe_ffn_hidden_size"] = round_up(hidden, 4 * (etp or tp))
    values["moe_shared_expert_intermediate_size"] = round_up(hidden, 4 * tp)
    by_key = {ENTRIES[name].key: value for name, value in values.items()}
    by_key = {key: value for key, value in by_key.items() if value_of(config, key) is not None}
    if "dense" in kinds or model_config.moe is None or model_config.moe.ffn_hidden_size is None:
        by_key["model.ffn_hidden_size"] = round_up(2 * hidden, 4 * lcm(tp, etp or 1))
    return with_values(config, by_key)


def divide(config: Config, names: Iterable[str]) -> Config:
    """Divide sizes by one number, the largest that the rules allow.

    A rank keeps two heads of each kind if it had as many, and a model twice as many experts as a
    token is routed to.
    """
    parallel, moe = config.parallel, config.model.moe
    unit = parallel.tensor_model_parallel_size
    unit *= parallel.context_parallel_size if parallel.cp_comm_type == "a2a" else 1
    least = 2 * unit
    if "num_experts" in names and moe is not None:
        least = max(8, 2 * moe.router_topk, 2 * parallel.expert_model_parallel_size)
    sizes = {
        key: size
        for name in names
        if (size := value_of(config, key := ENTRIES[name].key)) is not None
    }
    for number in range(gcd(*sizes.values()), 1, -1):
        if all(
            size % number == 0 and size // number >= min(size, least) for size in sizes.values()
        ):
            small = with_values(config, {key: size // number for key, size in sizes.items()})
            try:
                check_model(small)
                check_layout(small)
            except ConfigError:
                continue
            return small
    return config


def shrink_layers(num_layers: int, parallel: ParallelConfig) -> tuple[int, ParallelConfig]:
    """Two layers per stage, plus one if they were uneven; stages of a set length keep up to 3.

    >>> shrink_layers(80, ParallelConfig(pipeline_model_parallel_size=4))[0]
    8
    >>> small = shrink_layers(61, ParallelConfig(pipeline_model_parallel_size=4, decoder_first_pipeline_num_layers=7))
    >>> small[0], small[1].decoder_first_pipeline_num_layers
    (9, 3)
    """
    if parallel.pipeline_model_parallel_layout is not None:
        lengths = read_pipeline_layout(parallel.pipeline_model_parallel_layout)
        # others have none where Megatron-LM would run multi-token prediction
        outer = (0, len(lengths) - 1)
        small = [min(length, 3) or int(index not in outer) for index, length in enumerate(lengths)]
        return sum(small), replace(
            parallel, pipeline_model_parallel_layout=write_pipeline_layout(small)
        )
    ends = (parallel.decoder_first_pipeline_num_layers, parallel.decoder_last_pipeline_num_layers)
    # they share the layers of their rank evenly
    virtual = parallel.num_virtual_stages_per_pipeline_rank
    first, last = (None if size is None else virtual * min(size // virtual, 3) for size in ends)
    ranks = parallel.pipeline_model_parallel_size - sum(size is not None for size in ends)
    between, left = ranks * virtual, num_layers - sum(size or 0 for size in ends)
    middle = min(left, 2 * between + (left % between > 0)) if between else 0
    if counted := sum(parallel.counted_ends):
        middle = 2 * between - counted  # even again with what the ends count as
    parallel = replace(
        parallel, decoder_first_pipeline_num_layers=first, decoder_last_pipeline_num_layers=last
    )
    return middle + (first or 0) + (last or 0), parallel


def shrink_pattern(text: str, full: tuple[bool, ...], *, num_layers: int) -> str:
    """The pattern of fewer layers: evenly sampled from the full one, with both kinds of layers if
    it has both.

    >>> shrink_pattern("4", (True, True, True, False) * 2, num_layers=2)
    '[0, 1]'
    >>> shrink_pattern("[0]*3+[1]*58", (False,) * 3 + (True,) * 58, num_layers=4)
    '[0, 1, 1, 1]'
    >>> shrink_pattern("[0]+[1]*59+[0]", (False, *(True,) * 59, False), num_layers=4)
    '[0, 1, 1, 1]'
    """
    if "[" not in text and int(text) <= num_layers:  # a frequency
        return text
    small = [full[layer * len(full) // num_layers] for layer in range(num_layers)]
    for kind in set(full) - set(small):
        small[full.index(kind) * num_layers // len(full)] = kind
    return str(list(map(int, small)))


def shrink_letters(text: str | None, *, num_layers: int) -> str | None:
    """A hybrid layer pattern of fewer layers, with every kind of layer that there is room for.

    >>> shrink_letters("G-G-*E*E/*E", num_layers=5)
    'G-*EG/*E'
    """
    if text is None:
        return None
    letters, slash, mtp = text.partition("/")
    return "".join([*dict.fromkeys(letters), *letters][:num_layers]) + slash + mtp
