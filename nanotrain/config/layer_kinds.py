"""Sections of the model for kinds of layers other than softmax attention to all keys: their sizes."""

from dataclasses import dataclass
from typing import Literal

from nanotrain.config.option import above, at_least, option

NormPlacement = Literal["pre", "post", "sandwich"]
SparseAttentionType = Literal["dsa"]
LinearAttentionType = Literal["gated_delta_net", "kda", "mamba2", "attention_mamba2", "short_conv"]
DELTA_RULES = {"gated_delta_net", "kda"}  # of these types


@dataclass(frozen=True)
class DSAConfig:
    """DeepSeek Sparse Attention (DeepSeek-V3.2, section 2.1): its indexer; used with
    sparse_attention_type.
    """

    n_heads: int = option(64, "sparse attention: index heads", check=at_least(1))
    head_dim: int = option(
        128,
        "sparse attention: channels of an index head; the first qk_pos_emb_head_dim are rotary",
        check=at_least(1),
    )
    topk: int = option(2048, "sparse attention: keys that a query attends to", check=at_least(1))
    loss_coeff: float = option(
        1e-3,
        "sparse attention: coefficient of the indexer's loss; 0: the indexer gets no gradient",
        check=at_least(0),
    )
    use_sparse_loss: bool = option(
        False, "sparse attention: the indexer's loss is over the selected keys instead of all"
    )
    k_norm_epsilon: float = option(
        1e-6, "sparse attention: added to the variance in the norm of index keys", check=above(0)
    )


@dataclass(frozen=True)
class LinearAttentionConfig:
    """Layers with a state in place of keys and values; used with linear_attention_type."""

    conv_kernel_dim: int = option(
        4,
        "linear attention: tokens that a short convolution sees, its own included",
        check=at_least(2),
    )
    key_head_dim: int = option(
        128, "linear attention: channels of a query or key head", check=at_least(1)
    )
    value_head_dim: int = option(
        128, "linear attention: channels of a value head", check=at_least(1)
    )
    num_key_heads: int = option(16, "linear attention: query and key heads", check=at_least(1))
    num_value_heads: int = option(32, "linear attention: value heads", check=at_least(1))
    allow_neg_eigval: bool = option(
        False,
        "linear attention: corrections of up to twice the error, so states may change their sign (OLMo Hybrid)",
    )
    norm_epsilon: float | None = option(
        None,
        "linear attention: norm_epsilon of the norm of its outputs; unset: as in the others",
        check=above(0),
    )
    norm_placement: NormPlacement | None = option(
        None,
        "linear attention: norm_placement of its layers; unset: as in the others (OLMo Hybrid: pre beside post)",
    )


@dataclass(frozen=True)
class MambaConfig:
    """Mamba-2 (Dao and Gu 2024); used in layers of that kind."""

    state_dim: int = option(
        128, "Mamba-2: channels of a key or query, and rows of a state", check=at_least(1)
    )
    head_dim: int = option(64, "Mamba-2: channels of a value head", check=at_least(1))
    num_groups: int = option(
        8, "Mamba-2: groups of heads with one key and query", check=at_least(1)
    )
    num_heads: int | None = option(
        None, "Mamba-2: value heads; unset: 2 * hidden_size / mamba_head_dim", check=at_least(1)
    )
    conv_kernel_dim: int = option(
        4, "Mamba-2: tokens that a short convolution sees, its own included", check=at_least(2)
    )
    time_step_min: float = option(
        0.0, "Mamba-2: lower bound of the steps of tokens", check=at_least(0)
    )
    rms_norm: bool = option(True, "Mamba-2: normalize the gated outputs of every group")
    multipliers: list[float] = option(
        [1.0] * 5, "Mamba-2: factors on gate, value, key, query and step (Falcon-H1)"
    )
    output_multiplier: float = option(
        1.0, "attention_mamba2: factor on the output of Mamba-2", check=above(0)
    )
