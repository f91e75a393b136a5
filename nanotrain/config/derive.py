"""Values that follow from the configuration: sizes of the model, of the groups and of the batch."""

from collections.abc import Collection
from dataclasses import replace
from math import lcm
from typing import Any

from nanotrain.config.batch_schedule import read_steps
from nanotrain.config.config import (
    Activation,
    Config,
    MainGradsDType,
    MemoryConfig,
    ModelConfig,
    ParallelConfig,
    PositionEmbedding,
    PrecisionConfig,
    RecomputeGranularity,
    SoftmaxType,
    TrainConfig,
)
from nanotrain.config.pattern import read_no_rope_pattern, read_pattern, read_window_pattern
from nanotrain.errors import ConfigError, TopologyError
from nanotrain.quantities import count_of


def head_dim(model_config: ModelConfig) -> int:
    """Channels of a query or key head; with multi-latent attention those without and with positions.

    >>> head_dim(ModelConfig(hidden_size=256, num_attention_heads=4))
    64
    """
    if model_config.mla is not None:
        return model_config.mla.qk_head_dim + model_config.mla.qk_pos_emb_head_dim
    return model_config.kv_channels or model_config.hidden_size // model_config.num_attention_heads


def query_groups(model_config: ModelConfig) -> int:
    """Key/value heads: one per query head by default.

    >>> query_groups(ModelConfig(num_attention_heads=8, num_query_groups=2))
    2
    """
    return model_config.num_query_groups or model_config.num_attention_heads


def has_rope(model_config: ModelConfig) -> bool:
    """Whether queries and keys are rotated, plainly or by YaRN.

    >>> has_rope(ModelConfig())
    True
    """
    return model_config.position_embedding_type in (PositionEmbedding.rope, PositionEmbedding.yarn)


def is_rope_scaled(model_config: ModelConfig) -> bool:
    """Whether rotary frequencies are changed for a longer context.

    >>> is_rope_scaled(ModelConfig()), is_rope_scaled(ModelConfig(use_rope_scaling=True))
    (False, True)
    """
    if model_config.position_embedding_type is PositionEmbedding.yarn:
        return True
    return model_config.use_rope_scaling or model_config.rotary_seq_len_interpolation_factor != 1


def has_dropout(model_config: ModelConfig) -> bool:
    """Whether training drops anything.

    >>> has_dropout(ModelConfig(hidden_dropout=0.1))
    True
    """
    return model_config.attention_dropout > 0 or model_config.hidden_dropout > 0


def has_score_options(model_config: ModelConfig) -> bool:
    """Whether training changes attention scores or weights in addition to the softmax.

    >>> has_score_options(ModelConfig(attn_logit_softcapping=50.0))
    True
    """
    has_softcap = model_config.attn_logit_softcapping is not None
    return has_softcap or model_config.softmax_type is not SoftmaxType.vanilla or model_config.attention_dropout > 0


def rotary_dim(model_config: ModelConfig) -> int:
    """Rotated channels of a head; with MLA its rotary channels.

    >>> rotary_dim(ModelConfig(kv_channels=64, rotary_percent=0.5))
    32
    """
    if model_config.mla is not None:
        return model_config.mla.qk_pos_emb_head_dim
    return int(head_dim(model_config) * model_config.rotary_percent)


def ffn_size(model_config: ModelConfig) -> int:
    """Inner width of the MLP: 4x hidden, or with swiglu 8/3x hidden rounded up to a multiple of 64.

    >>> ffn_size(ModelConfig(hidden_size=256)), ffn_size(ModelConfig(hidden_size=256, activation=Activation.gelu))
    (704, 1024)
    """
    if model_config.ffn_hidden_size is not None:
        return model_config.ffn_hidden_size
    if model_config.activation is not Activation.swiglu:
        return 4 * model_config.hidden_size
    return round_up(-(-8 * model_config.hidden_size // 3), 64)


def padded_vocab_size(model_config: ModelConfig) -> int:
    """Rows of the embedding: the vocabulary rounded up, so that every tensor-parallel size may divide it.

    Raises:
        ConfigError: the size of the vocabulary is not set.

    >>> padded_vocab_size(ModelConfig(vocab_size=50257))
    50304
    """
    if model_config.vocab_size is None:
        why = "model.vocab_size is unset and no tokenizer was read"
        raise ConfigError("the size of the vocabulary is not known yet", why=why, fix="set --vocab-size")
    return round_up(model_config.vocab_size, model_config.make_vocab_size_divisible_by)


def with_padding_for(model_config: ModelConfig, tensor_parallel_size: int) -> ModelConfig:
    """The model with a vocabulary that this many ranks can share: where they cannot, it has more padding.

    >>> with_padding_for(ModelConfig(vocab_size=257, make_vocab_size_divisible_by=1), 2).make_vocab_size_divisible_by
    2
    """
    if padded_vocab_size(model_config) % tensor_parallel_size == 0:
        return model_config
    multiple = lcm(model_config.make_vocab_size_divisible_by, tensor_parallel_size)
    return replace(model_config, make_vocab_size_divisible_by=multiple)


def moe_layers(model_config: ModelConfig) -> tuple[bool, ...]:
    """Whether each layer has experts.

    Raises:
        ConfigError: a pattern that is invalid or does not have one 0 or 1 per layer.

    >>> from nanotrain.config.config import MoEConfig
    >>> moe_layers(ModelConfig(num_layers=4, moe=MoEConfig(num_experts=8, layer_freq="2")))
    (True, False, True, False)
    >>> moe_layers(ModelConfig(num_layers=4, moe=MoEConfig(num_experts=8, layer_freq="[0]*1+[1]*3")))
    (False, True, True, True)
    """
    moe = model_config.moe
    if moe is None or moe.num_experts is None:  # a model that is not complete yet has other settings of experts
        return (False,) * model_config.num_layers
    pattern = read_pattern(moe.layer_freq)
    if isinstance(pattern, int):
        return tuple(layer % pattern == 0 for layer in range(model_config.num_layers))
    if len(pattern) != model_config.num_layers:
        raise ConfigError(
            f"moe_layer_freq {moe.layer_freq} is for {count_of(len(pattern), 'layer')}",
            why=f"num_layers is {model_config.num_layers}, and the pattern has one 0 or 1 for each",
            fix=f"set --moe-layer-freq '[1]*{model_config.num_layers}' with a 0 for every dense layer",
        )
    return tuple(bool(entry) for entry in pattern)


def window_layers(model_config: ModelConfig) -> tuple[bool, ...]:
    """Whether each layer attends within a window.

    Raises:
        ConfigError: an invalid pattern.

    >>> window_layers(ModelConfig(num_layers=4, window_size=8, window_attn_skip_freq="2"))
    (True, False, True, False)
    """
    if model_config.window_size is None:
        return (False,) * model_config.num_layers
    return read_window_pattern(model_config.window_attn_skip_freq, model_config.num_layers)


def is_model_known(config: Config) -> bool:
    """Whether the model section is complete before a checkpoint or a Hugging Face folder is read."""
    return config.checkpoint.pretrained_checkpoint is None and not config.checkpoint.use_checkpoint_args


def no_rope_layers(model_config: ModelConfig) -> tuple[bool, ...]:
    """Whether each layer is without rotary positions, in a model that has them.

    Raises:
        ConfigError: an invalid pattern.

    >>> no_rope_layers(ModelConfig(num_layers=4, no_rope_freq="2"))
    (False, True, False, True)
    """
    return read_no_rope_pattern(model_config.no_rope_freq, model_config.num_layers)


GATED = (Activation.swiglu, Activation.quick_geglu, Activation.geglu_tanh)


def moe_ffn_size(model_config: ModelConfig) -> int:
    """Inner width of an expert.

    >>> from nanotrain.config.config import MoEConfig
    >>> moe_ffn_size(ModelConfig(moe=MoEConfig(num_experts=2, ffn_hidden_size=96)))
    96
    """
    moe = model_config.moe
    return ffn_size(model_config) if moe is None or moe.ffn_hidden_size is None else moe.ffn_hidden_size


def accumulates_grads_in_fp32(precision: PrecisionConfig) -> bool:
    """Whether gradient buffers are fp32: unless a setting asks for gradients in params_dtype.

    >>> accumulates_grads_in_fp32(PrecisionConfig(grad_reduce_in_bf16=True))
    False
    """
    if precision.accumulate_allreduce_grads_in_fp32 is not None:
        return precision.accumulate_allreduce_grads_in_fp32
    return not precision.grad_reduce_in_bf16 and precision.main_grads_dtype is MainGradsDType.fp32


def recomputed_modules(memory: MemoryConfig) -> tuple[str, ...]:
    """The modules of selective recomputation; none with another granularity.

    >>> recomputed_modules(MemoryConfig(recompute_granularity=RecomputeGranularity.selective))
    ('core_attn',)
    """
    if memory.recompute_granularity is not RecomputeGranularity.selective:
        return ()
    return tuple(memory.recompute_modules) or ("core_attn",)


def data_parallel_size(parallel: ParallelConfig, world_size: int) -> int:
    """Data-parallel ranks: world size / (tp x cp x pp).

    Raises:
        TopologyError: where the ranks do not divide.

    >>> data_parallel_size(ParallelConfig(tensor_model_parallel_size=2), 8)
    4
    """
    tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    pp = parallel.pipeline_model_parallel_size
    unit = tp * cp * pp
    if world_size % unit:
        raise TopologyError(
            f"{count_of(world_size, 'rank')} cannot form tp={tp} x cp={cp} x pp={pp}",
            why=f"tp*cp*pp = {unit} must divide the world size",
            fix=f"run on {count_of(round_up(world_size, unit), 'rank')}"
            + (f" (nanotrain train --nproc-per-node {unit} ...)" if world_size == 1 else "")
            + " or lower one of the three sizes",
        )
    return world_size // unit


def counted_ends(parallel: ParallelConfig) -> tuple[int, int]:
    """Layers that the embedding and the head count as where layers are split evenly over stages."""
    return int(parallel.account_for_embedding_in_pipeline_split), int(parallel.account_for_loss_in_pipeline_split)


def global_batch_size(train: TrainConfig, dp: int) -> int:
    """Samples per optimizer step over all ranks, with a schedule its last size; unset means one microbatch per rank.

    >>> global_batch_size(TrainConfig(micro_batch_size=4), 2)
    8
    """
    if train.step_batch_size_schedule:
        return read_steps(train.step_batch_size_schedule, 1).final
    return train.global_batch_size or train.micro_batch_size * dp


def num_microbatches(train: TrainConfig, dp: int) -> int:
    """Microbatches per rank and optimizer step; if they do not divide evenly, some ranks have one of padding.

    Raises:
        ConfigError: the microbatch size does not divide the global batch, or there are fewer microbatches than ranks.

    >>> [num_microbatches(TrainConfig(micro_batch_size=2, global_batch_size=24), dp) for dp in (4, 5)]
    [3, 3]
    """
    batch_size, per_pass = global_batch_size(train, dp), train.micro_batch_size * dp
    if batch_size % train.micro_batch_size:
        raise ConfigError(
            f"a global batch of {count_of(batch_size, 'sample')} cannot be split into microbatches",
            why=f"micro_batch_size {train.micro_batch_size} must divide it",
            fix=f"set --global-batch-size {round_up(batch_size, per_pass)} or another --micro-batch-size",
        )
    if batch_size < per_pass:
        raise ConfigError(
            f"a global batch of {count_of(batch_size, 'sample')} has less than one microbatch per rank",
            why=f"micro_batch_size {train.micro_batch_size} x data-parallel size {dp} = {per_pass}",
            fix=f"set --global-batch-size {per_pass} or "
            + (
                "another --micro-batch-size"
                if batch_size >= dp
                else f"run on fewer ranks: data-parallel size {batch_size} or less"
            ),
        )
    return -(-batch_size // per_pass)


def round_up(number: int, unit: int) -> int:
    """The smallest multiple of `unit` that is at least `number`.

    >>> round_up(5, 4)
    8
    """
    return -(-number // unit) * unit


def validates(config: Config) -> bool:
    """Whether the run validates: it has steps with a validation, and `split` leaves documents for it.

    >>> from nanotrain.config.config import DataConfig
    >>> validates(Config()), validates(Config(data=DataConfig(split="100,0,0")))
    (True, False)
    """
    train, data = config.train, config.data
    if train.eval_interval == 0 or train.eval_iters == 0:
        return False
    shares = data.split.split(",")
    is_divided = not (data.mock_data or data.train_data_path or data.valid_data_path)
    return not is_divided or len(shares) > 1 and float(shares[1]) > 0


def without_quickstart(config: Config, *, explicit: Collection[str]) -> dict[str, tuple[Any, str]]:
    """Values that a quick-start recipe changes on other data, by key, each with its reason.

    With synthetic tokens no tokenizer is trained, so the vocabulary size is set to that of the quick start. With
    another corpus the recipe's prompt, which is Python code, is left out.

    Args:
        config: of a command line.
        explicit: keys that the command line sets; they stay.
    """
    data, values = config.data, dict[str, tuple[Any, str]]()
    if not data.quickstart:
        return {}
    if data.mock_data:
        has_tokenizer = data.tokenizer_model is not None or data.vocab_file is not None
        if config.model.vocab_size is None and not has_tokenizer:
            values["model.vocab_size"] = data.quickstart_vocab_size, "--mock-data: data.quickstart_vocab_size"
    elif data.data_path or data.train_data_path or data.stages:
        why = "the corpus is not that of the quick start"
        values = {"data.quickstart": (False, why), "train.generate_prompt": ("", why)}
    return {key: value for key, value in values.items() if key not in explicit}
