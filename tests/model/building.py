"""Models with storage, for tests: one shape per family and the building of whole models and stages."""

from dataclasses import replace

import torch

from nanotrain.config.model import ModelConfig, YarnConfig
from nanotrain.data.batch import Batch
from nanotrain.model.parameters import initialize
from nanotrain.model.transformer import Stage, build_stage
from nanotrain.precision.dtypes import TORCH_DTYPES
from nanotrain.spec.stages import StageSpec

# 131 is no multiple of 128, so every model here has a padded vocabulary.
VOCAB = 131

LLAMA = ModelConfig(
    num_layers=2,
    hidden_size=32,
    ffn_hidden_size=48,
    num_attention_heads=4,
    num_query_groups=2,
    max_position_embeddings=64,
    vocab_size=VOCAB,
    norm_epsilon=1e-6,
)
LLAMA3 = replace(
    LLAMA,
    rotary_base=500000.0,
    use_rope_scaling=True,
    rope_original_max_positions=16,
    rope_scaling_factor=4.0,
)
YARN = replace(
    LLAMA,
    position_embedding_type="yarn",
    yarn=YarnConfig(rotary_scaling_factor=4.0, original_max_position_embeddings=16),
)
QWEN2 = replace(LLAMA, add_qkv_bias=True, rotary_base=1000000.0)
QWEN3 = replace(LLAMA, qk_layernorm=True, kv_channels=16)
GPT2 = ModelConfig(
    num_layers=2,
    hidden_size=32,
    num_attention_heads=4,
    max_position_embeddings=64,
    vocab_size=VOCAB,
    position_embedding_type="learned_absolute",
    normalization="LayerNorm",
    activation="gelu_tanh",
    add_bias_linear=True,
)
FAMILIES = {"gpt2": GPT2, "llama": LLAMA, "llama3": LLAMA3, "qwen2": QWEN2, "qwen3": QWEN3}
# Every family with tied and with untied embeddings.
MODELS = FAMILIES | {
    f"{name}-untied": replace(model, untie_embeddings_and_output_weights=True)
    for name, model in FAMILIES.items()
}


def give_storage(stage: Stage, *, device: str = "cpu") -> Stage:
    """Replace every parameter of a meta stage by one with storage, as the data-parallel layer does."""
    for name, parameter in list(stage.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        storage = torch.full(parameter.shape, float("nan"), dtype=parameter.dtype, device=device)
        stage.get_submodule(owner)._parameters[leaf] = torch.nn.Parameter(storage)
    return stage


def build(
    model: ModelConfig,
    *,
    spec: StageSpec | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 1,
) -> Stage:
    """A stage with initial weights; the full model where no spec is given."""
    name = next(name for name, torch_dtype in TORCH_DTYPES.items() if torch_dtype is dtype)
    stage = give_storage(build_stage(model, spec, dtype=name))
    initialize(stage, stage.params, seed=seed)
    return stage


def randomize(stage: Stage, *, seed: int = 0) -> Stage:
    """Give biases and norms values too, which start as constants and so would hide a mix-up."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in stage.parameters():
        noise = torch.empty(parameter.shape).normal_(0.0, 0.1, generator=generator)
        parameter.data.add_(noise)
    return stage


def random_batch(*, batch: int = 2, length: int = 24, vocab: int = VOCAB, seed: int = 0) -> Batch:
    """A batch whose loss mask leaves out about a third of the targets."""
    generator = torch.Generator().manual_seed(seed)
    stream = torch.randint(0, vocab, (batch, length + 1), generator=generator)
    mask = (torch.rand(batch, length, generator=generator) > 0.3).float()
    return Batch(stream[:, :-1].contiguous(), stream[:, 1:].contiguous(), mask, None, None)
