"""Numbers that follow from the configuration: sizes of the model, of the groups and of the batch."""

from nanotrain.config.config import Activation, ModelConfig, ParallelConfig, PositionEmbedding, TrainConfig
from nanotrain.config.config import Normalization as Norm
from nanotrain.errors import ConfigError, TopologyError


def head_dim(model: ModelConfig) -> int:
    """Width of one attention head.

    >>> head_dim(ModelConfig(hidden_size=256, num_attention_heads=4))
    64
    """
    return model.kv_channels or model.hidden_size // model.num_attention_heads


def query_groups(model: ModelConfig) -> int:
    """Key/value heads: one per query head where nothing else is said.

    >>> query_groups(ModelConfig(num_attention_heads=8, num_query_groups=2))
    2
    """
    return model.num_query_groups or model.num_attention_heads


def ffn_size(model: ModelConfig) -> int:
    """Width inside the MLP: 4x hidden, or with swiglu 8/3x hidden rounded up to a multiple of 64.

    >>> ffn_size(ModelConfig(hidden_size=256)), ffn_size(ModelConfig(hidden_size=256, activation=Activation.gelu))
    (704, 1024)
    """
    if model.ffn_hidden_size is not None:
        return model.ffn_hidden_size
    if model.activation is not Activation.swiglu:
        return 4 * model.hidden_size
    return -(-8 * model.hidden_size // (3 * 64)) * 64


def padded_vocab_size(model: ModelConfig) -> int:
    """Rows of the embedding: the vocabulary rounded up, so that every tensor-parallel size may divide it.

    Raises:
        ConfigError: where the vocabulary is still to be read from the tokenizer.

    >>> padded_vocab_size(ModelConfig(vocab_size=50257))
    50304
    """
    if model.vocab_size is None:
        raise ConfigError(
            "the size of the vocabulary is not known yet",
            why="model.vocab_size is unset and no tokenizer was read",
            fix="set --vocab-size",
        )
    multiple = model.make_vocab_size_divisible_by
    return -(-model.vocab_size // multiple) * multiple


def parameter_count(model: ModelConfig) -> int:
    """Elements of all parameters, without the padding of the vocabulary.

    >>> gpt2 = ModelConfig(num_layers=1, hidden_size=8, num_attention_heads=1, vocab_size=10)
    >>> parameter_count(gpt2) == 10 * 8 + 4 * 8 * 8 + 3 * 8 * 64 + 3 * 8
    True
    """
    hidden, ffn = model.hidden_size, ffn_size(model)
    query, key = model.num_attention_heads * head_dim(model), query_groups(model) * head_dim(model)
    norm = 2 * hidden if model.normalization is Norm.LayerNorm else hidden
    up_projections = 2 if model.activation is Activation.swiglu else 1

    block = 2 * norm + hidden * (2 * query + 2 * key) + hidden * ffn * (up_projections + 1)
    if model.add_bias_linear or model.add_qkv_bias:
        block += query + 2 * key
    if model.add_bias_linear:
        block += hidden + up_projections * ffn + hidden
    if model.qk_layernorm:
        block += 2 * head_dim(model)

    embedding = (model.vocab_size or 0) * hidden
    total = model.num_layers * block + norm + embedding
    if model.position_embedding_type is PositionEmbedding.learned_absolute:
        total += model.max_position_embeddings * hidden
    return total + embedding if model.untie_embeddings_and_output_weights else total


def data_parallel_size(parallel: ParallelConfig, world_size: int) -> int:
    """Ranks that read different samples: world / (tp x cp x pp).

    Raises:
        TopologyError: where the ranks do not divide.

    >>> data_parallel_size(ParallelConfig(tensor_model_parallel_size=2), 8)
    4
    """
    tp, cp, pp = (
        parallel.tensor_model_parallel_size,
        parallel.context_parallel_size,
        parallel.pipeline_model_parallel_size,
    )
    if world_size % (tp * cp * pp):
        raise TopologyError(
            f"{world_size} ranks cannot form tp={tp} x cp={cp} x pp={pp}",
            why=f"tp*cp*pp = {tp * cp * pp} must divide the world size",
            fix=f"run on {-(-world_size // (tp * cp * pp)) * tp * cp * pp} ranks or lower one of the three sizes",
        )
    return world_size // (tp * cp * pp)


def global_batch_size(train: TrainConfig, dp: int) -> int:
    """Samples per optimizer step over all ranks; unset means one microbatch per rank.

    >>> global_batch_size(TrainConfig(micro_batch_size=4), 2)
    8
    """
    return train.global_batch_size or train.micro_batch_size * dp


def num_microbatches(train: TrainConfig, dp: int) -> int:
    """Microbatches one rank passes through the model per optimizer step.

    Raises:
        ConfigError: where the global batch does not divide.

    >>> num_microbatches(TrainConfig(micro_batch_size=2, global_batch_size=24), 4)
    3
    """
    whole, per_pass = global_batch_size(train, dp), train.micro_batch_size * dp
    if whole % per_pass:
        raise ConfigError(
            f"a global batch of {whole} samples cannot be cut into microbatches",
            why=f"micro_batch_size {train.micro_batch_size} x data-parallel size {dp} = {per_pass} must divide it",
            fix=f"set --global-batch-size {-(-whole // per_pass) * per_pass} or another --micro-batch-size",
        )
    return whole // per_pass
