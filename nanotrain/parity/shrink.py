"""A configuration made small: the same structure and the same layout, in a model that a few CPU processes can train.

    kept      layout, strategy, overlap, schedule; norms, activation, biases, tied or not, positions, attention kind,
              query heads per key/value head, expert routing, which kinds of layers there are; AdamW's decays; the seed
    shrunk    layers (two a stage), heads, widths, experts, sequence, vocabulary:
              the least that the layout still divides, with several heads and experts on every rank
    changed   fp32 on the CPU; no clipping, warmup or decay of the learning rate, so that a wrong gradient stays with
              its parameter and every step moves; Adam's epsilon above the roundings of a gradient; start values as
              large as small widths want; random tokens

Every rule is a pure function of the configuration, so a report can be repeated.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import lcm
from typing import Any

from nanotrain.config.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    DeviceKind,
    LRDecayStyle,
    MLAConfig,
    ModelConfig,
    MoEConfig,
    OptimConfig,
    ParallelConfig,
    PrecisionConfig,
    TrainConfig,
)
from nanotrain.config.derive import data_parallel_size, moe_layers, query_groups
from nanotrain.config.pattern import read_pattern, write_pattern

VOCAB_SIZE = 203  # no multiple of 128, so padding takes part
LEAST_SEQ_LENGTH = 24
BUCKET_SIZE = 5000  # elements: a stage has several buckets
LEARNING_RATE = 1e-3
# Adam divides by the gradient's own size: one element whose gradient is rounding (4e-8 among 1e-1) moves either way by
# a whole learning rate, which was seen to change the next loss by 1e-5. With this it moves by a hundredth of that.
LEAST_ADAM_EPS = 1e-5


def shrink(config: Config, world_size: int, *, num_steps: int) -> Config:
    """The configuration with its structure and layout in the smallest model that keeps both.

    Args:
        config: a valid configuration whose model section is complete but for the vocabulary.
        world_size: ranks to run on.
        num_steps: optimizer steps.

    Raises:
        TopologyError: the layout does not fit the ranks.
    """
    dp = data_parallel_size(config.parallel, world_size)
    seq_length = shrink_sequence(config.parallel)
    micro_batch_size = min(config.train.micro_batch_size, 2)
    num_microbatches = config.parallel.pipeline_model_parallel_size + 1  # at least 2; a pipeline gets into its rhythm
    data, lengths = config.data, shrink_layers(config.model.num_layers, config.parallel)
    return Config(
        model=shrink_model(config, seq_length),
        parallel=replace(
            config.parallel,
            ddp_bucket_size=BUCKET_SIZE,
            decoder_first_pipeline_num_layers=lengths.first,
            decoder_last_pipeline_num_layers=lengths.last,
        ),
        precision=PrecisionConfig(),
        optim=OptimConfig(
            lr=LEARNING_RATE,
            lr_decay_style=LRDecayStyle.constant,
            clip_grad=0.0,
            adam_eps=max(config.optim.adam_eps, LEAST_ADAM_EPS),
            **_kept(config.optim, "weight_decay", "adam_beta1", "adam_beta2"),
        ),
        data=DataConfig(
            seq_length=seq_length,
            num_workers=0,
            reset_position_ids=data.reset_position_ids,
            reset_attention_mask=data.reset_attention_mask,
            eod_mask_loss=data.eod_mask_loss,
        ),
        checkpoint=CheckpointConfig(save=False),
        train=TrainConfig(
            train_iters=num_steps,
            micro_batch_size=micro_batch_size,
            global_batch_size=micro_batch_size * dp * num_microbatches,
            seed=config.train.seed,
            device=DeviceKind.cpu,
            eval_interval=0,
        ),
    )


def on_one_rank(config: Config) -> Config:
    """A shrunk configuration without a layout: what one rank trains on the same samples."""
    return replace(config, parallel=ParallelConfig(ddp_bucket_size=config.parallel.ddp_bucket_size))


def shrink_sequence(parallel: ParallelConfig) -> int:
    """The shortest sequence of at least 24 tokens that cp (two chunks a rank) and tp cut evenly.

    >>> shrink_sequence(ParallelConfig(context_parallel_size=4, tensor_model_parallel_size=2))
    24
    """
    unit = parallel.context_parallel_size * lcm(2, parallel.tensor_model_parallel_size)
    return _round_up(LEAST_SEQ_LENGTH, unit)


def shrink_model(config: Config, seq_length: int) -> ModelConfig:
    """The model section of the small configuration.

    Args:
        config: the large one.
        seq_length: tokens of a small sample.
    """
    model_config, parallel = config.model, config.parallel
    num_layers = shrink_layers(model_config.num_layers, parallel).num_layers
    has_longer_positions = model_config.max_position_embeddings > config.data.seq_length
    multiple, tp = model_config.make_vocab_size_divisible_by, parallel.tensor_model_parallel_size
    sizes = shrink_attention(model_config, parallel)
    sizes["init_method_std"] = sizes["hidden_size"] ** -0.5
    small = replace(
        model_config,
        num_layers=num_layers,
        max_position_embeddings=seq_length + 8 * has_longer_positions,
        vocab_size=VOCAB_SIZE,
        make_vocab_size_divisible_by=multiple if multiple <= 128 and multiple % tp == 0 else lcm(16, tp),
        **sizes,
    )
    if model_config.moe.ffn_hidden_size is None or not all(moe_layers(model_config)):  # else no layer has an MLP
        ranks = lcm(tp, parallel.expert_tensor_parallel_size or 1)
        small = replace(small, ffn_hidden_size=_width(2 * small.hidden_size, ranks=ranks))
    if model_config.moe.num_experts is None:
        return small
    experts = shrink_experts(model_config, parallel, num_layers=num_layers, ffn_size=small.hidden_size)
    return replace(small, moe=experts)


@dataclass(frozen=True)
class Lengths:
    """Layers of a small model, and of its ends where they have a length of their own."""

    num_layers: int
    first: int | None
    last: int | None


def shrink_layers(num_layers: int, parallel: ParallelConfig) -> Lengths:
    """Two layers a stage and one more where they do not come out even; an end with a length of its own keeps up to 3.

    >>> shrink_layers(80, ParallelConfig(pipeline_model_parallel_size=4))
    Lengths(num_layers=8, first=None, last=None)
    >>> shrink_layers(61, ParallelConfig(pipeline_model_parallel_size=4, decoder_first_pipeline_num_layers=7))
    Lengths(num_layers=9, first=3, last=None)
    """
    ends = (parallel.decoder_first_pipeline_num_layers, parallel.decoder_last_pipeline_num_layers)
    first, last = (None if size is None else min(size, 3) for size in ends)
    stages = parallel.pipeline_model_parallel_size * parallel.num_virtual_stages_per_pipeline_rank
    between, left = stages - sum(size is not None for size in ends), num_layers - sum(size or 0 for size in ends)
    middle = min(left, 2 * between + (left % between > 0)) if between else 0
    return Lengths(middle + (first or 0) + (last or 0), first, last)


def shrink_attention(model_config: ModelConfig, parallel: ParallelConfig) -> dict[str, Any]:
    """Heads, their widths and the width of the residual stream.

    Groups and heads stay in proportion, and a rank holds two groups where it held several.
    """
    tp, mla = parallel.tensor_model_parallel_size, model_config.mla
    unit = tp * parallel.context_parallel_size if parallel.cp_comm_type == "a2a" else tp
    if model_config.multi_latent_attention:
        heads = _first(unit, least=2 * unit, most=model_config.num_attention_heads)
        return {
            "hidden_size": 48,
            "num_attention_heads": heads,
            "mla": MLAConfig(
                q_lora_rank=None if mla.q_lora_rank is None else 24,
                kv_lora_rank=16,
                qk_head_dim=8,
                qk_pos_emb_head_dim=4,
                v_head_dim=8 if mla.v_head_dim == mla.qk_head_dim else 12,
            ),
        }
    ratio, groups = model_config.num_attention_heads // query_groups(model_config), query_groups(model_config)
    if groups >= tp:
        groups = _first(tp, least=2 * tp, most=groups, fits=lambda count: ratio * count % unit == 0)
    heads = ratio * groups
    width = 4 * -(-8 // heads)  # rope turns pairs of channels; four make rows that grouped products take
    return {
        "hidden_size": heads * width + (8 if model_config.kv_channels is not None else 0),
        "num_attention_heads": heads,
        "num_query_groups": None if model_config.num_query_groups is None else groups,
        "kv_channels": None if model_config.kv_channels is None else width,
    }


def shrink_experts(model_config: ModelConfig, parallel: ParallelConfig, *, num_layers: int, ffn_size: int) -> MoEConfig:
    """The experts, their widths and which layers have them; a token still chooses among at least twice as many.

    Args:
        model_config: the large model.
        parallel: its layout.
        num_layers: of the small one.
        ffn_size: about how wide a small expert is.
    """
    moe, tp, ep = model_config.moe, parallel.tensor_model_parallel_size, parallel.expert_model_parallel_size
    assert moe.num_experts is not None, "only called for a mixture"
    groups, chosen, topk = moe.router_num_groups or 1, moe.router_group_topk or 1, moe.router_topk
    num_experts = _first(
        lcm(ep, groups),
        least=max(8, 2 * topk, 2 * ep),
        most=moe.num_experts,
        fits=lambda count: topk <= chosen * (count // groups),
    )
    has_shared, has_own_width = moe.shared_expert_intermediate_size is not None, moe.ffn_hidden_size is not None
    width = _width(ffn_size, ranks=parallel.expert_tensor_parallel_size or tp)
    return replace(
        moe,
        num_experts=num_experts,
        layer_freq=shrink_pattern(model_config, num_layers),
        ffn_hidden_size=width if has_own_width else None,
        shared_expert_intermediate_size=_width(ffn_size, ranks=tp) if has_shared else None,
    )


def shrink_pattern(model_config: ModelConfig, num_layers: int) -> str:
    """Which of fewer layers have experts: evenly picked from the pattern, with both kinds where it has both.

    >>> shrink_pattern(ModelConfig(num_layers=61, moe=MoEConfig(num_experts=8, layer_freq="[0]*3+[1]*58")), 4)
    '[0]+[1]*3'
    >>> shrink_pattern(ModelConfig(num_layers=61, moe=MoEConfig(num_experts=8, layer_freq="[0]+[1]*59+[0]")), 4)
    '[0]+[1]*3'
    """
    if isinstance(read_pattern(model_config.moe.layer_freq), int):
        return model_config.moe.layer_freq
    before = moe_layers(model_config)
    picked = [before[layer * len(before) // num_layers] for layer in range(num_layers)]
    missing = set(before) - set(picked)
    for kind in missing:
        picked[before.index(kind) * num_layers // len(before)] = kind
    return write_pattern(tuple(picked))


def _first(unit: int, *, least: int, most: int, fits: Callable[[int], bool] = lambda count: True) -> int:
    """The least multiple of a unit from `least` on that fits, at most `most`, which is known to."""
    start = _round_up(min(least, most), unit)
    return next((count for count in range(start, most, unit) if fits(count)), most)


def _width(about: int, *, ranks: int) -> int:
    """A width that ranks share in multiples of 4, which rows of 16 bytes are made of."""
    return _round_up(about, 4 * ranks)


def _round_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit


def _kept(section: object, *names: str) -> dict[str, Any]:
    return {name: getattr(section, name) for name in names}
