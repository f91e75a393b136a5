"""Rules of the model section: positions, attention, layers and heads; `experts.py` has the others.

A rule is an `if` and the error that it yields. A function ends at a field that could not be read.
"""

from math import ceil

from nanotrain.config.model import ModelConfig
from nanotrain.config.notation import read_hybrid_pattern, read_mtp_patterns
from nanotrain.config.optim import FIXED_NORM_OPTIMIZERS
from nanotrain.config.rules.settings import Errors, Settings
from nanotrain.config.schema import typed
from nanotrain.errors import ConfigError
from nanotrain.quantities import count_of, round_up


def check_positions(c: Settings) -> Errors:
    """Check sequence length and learned positions."""
    longest = c.model.max_position_embeddings
    if c.data.seq_length > longest:
        yield ConfigError(
            f"seq_length {c.data.seq_length} is longer than max_position_embeddings {longest}",
            why="the model has no positions beyond",
            fix=f"set --seq-length {longest} or raise --max-position-embeddings",
        )
    if c.mtp.num_layers and c.model.position_embedding_type == "learned_absolute":
        yield ConfigError(
            f"mtp_num_layers {c.mtp.num_layers} with position_embedding_type learned_absolute",
            why="multi-token prediction reads tokens after the last position of the table, as in "
            "Megatron-LM",
            fix="set --position-embedding-type rope, or leave --mtp-num-layers out",
        )
    has_factor = c.model.use_mup and c.model.mup_embedding_mult != 1
    if has_factor and c.model.position_embedding_type == "learned_absolute":
        yield ConfigError(
            f"mup_embedding_mult {c.model.mup_embedding_mult:g} with learned positions",
            why="Megatron-LM multiplies the sum of word and position embeddings, and here words "
            "alone are multiplied",
            fix="set --position-embedding-type rope, or leave --mup-embedding-mult out",
        )


def check_query_norms(c: Settings) -> Errors:
    """Check norms of queries and keys."""
    model = c.model
    no_effect = (
        "queries and keys are normalized after their projections, so the size of those weights "
        "has no effect"
    )
    if c.optim.qk_clip and model.qk_layernorm and not model.multi_latent_attention:
        yield ConfigError(
            "qk_clip with qk_layernorm",
            why=no_effect,
            fix="leave out --qk-clip or --qk-layernorm",
        )
    if c.optim.qk_clip and model.qk_l2_norm:
        yield ConfigError(
            "qk_clip with qk_l2_norm",
            why=no_effect,
            fix="leave out --qk-clip or --qk-l2-norm",
        )
    if c.optim.qk_clip and c.optim.optimizer in FIXED_NORM_OPTIMIZERS:
        yield ConfigError(
            f"qk_clip with --optimizer {c.optim.optimizer}",
            why="the next update gives a clipped matrix its norm back",
            fix="leave out --qk-clip, or set --optimizer muon",
        )
    if model.qk_l2_norm and model.qk_layernorm:
        yield ConfigError(
            "qk_l2_norm with qk_layernorm",
            why="queries and keys have one norm, without weights or with them",
            fix="leave out --qk-l2-norm or --qk-layernorm",
        )


def check_rotary_embedding(c: Settings) -> Errors:
    """RoPE and YaRN."""
    model = c.model
    if model.rotary_percent > 1 and not model.multi_latent_attention:
        yield ConfigError(
            f"rotary_percent is {model.rotary_percent}",
            why="it is a share of the channels of a head",
            fix="set --rotary-percent to at most 1",
        )
    factor = c.yarn.rotary_scaling_factor
    if model.position_embedding_type == "yarn" and factor <= 1:
        yield ConfigError(
            f"position_embedding_type is yarn and rotary_scaling_factor is {factor}",
            why="YaRN extends the context by this factor",
            fix="set --rotary-scaling-factor above 1, or --position-embedding-type rope",
        )
    if c.yarn.beta_fast <= c.yarn.beta_slow:
        yield ConfigError(
            f"beta_fast {c.yarn.beta_fast} is not above beta_slow {c.yarn.beta_slow}",
            why="pairs between the two rotation counts are interpolated",
            fix="set --beta-fast above --beta-slow",
        )


def check_longrope(c: Settings) -> Errors:
    """LongRoPE: factors of all pairs, and one choice of them for all sequences."""
    if c.model.position_embedding_type != "longrope":
        return
    num_pairs = c.model.rotary_dim // 2
    factors = {"short_factor": c.longrope.short_factor, "long_factor": c.longrope.long_factor}
    for name, values in factors.items():
        if len(values) != num_pairs:
            yield ConfigError(
                f"longrope_{name} has {count_of(len(values), 'number')}",
                why=f"each of {count_of(num_pairs, 'pair')} of rotated channels has one",
                fix=f"set --longrope-{name.replace('_', '-')} with {num_pairs}",
            )
    window_pairs = c.model.window_rotary_dim // 2
    if c.model.rotary_base_local is None and window_pairs != num_pairs:
        yield ConfigError(
            f"position_embedding_type longrope with {count_of(window_pairs, 'pair')} of rotated "
            "channels in layers with a window",
            why=f"its factors are of {count_of(num_pairs, 'pair')}, as in the other layers",
            fix="set --rotary-base-local, which needs no factors, or leave --window-kv-channels "
            "and --window-rotary-percent out",
        )
    original = c.longrope.original_max_positions
    length = c.data.seq_length
    if c.data.reset_position_ids and length > original:
        yield ConfigError(
            f"position_embedding_type longrope with reset_position_ids and seq_length {length}",
            why=f"which factors apply would be chosen by the longest document of a micro batch, of "
            f"up to {original} positions or more",
            fix=f"leave out --reset-position-ids, or set --seq-length to at most {original}",
        )


def check_sparse_attention(c: Settings) -> Errors:
    """DeepSeek Sparse Attention and its indexer."""
    model = c.model
    if model.sparse_attention_type != "dsa":
        return
    if not model.multi_latent_attention:
        yield ConfigError(
            "sparse_attention_type dsa without multi_latent_attention",
            why="its indexer reads the compressed queries of multi-latent attention",
            fix="set --multi-latent-attention and --q-lora-rank, or leave --sparse-attention-type "
            "out",
        )
    if model.multi_latent_attention and c.mla.q_lora_rank is None:
        yield ConfigError(
            "sparse_attention_type dsa and q_lora_rank is unset",
            why="its indexer reads the compressed queries, and without q_lora_rank queries are "
            "projected directly",
            fix="set --q-lora-rank, 1536 in DeepSeek-V3.2",
        )
    rotary = c.mla.qk_pos_emb_head_dim
    if c.dsa.head_dim < rotary:
        yield ConfigError(
            f"dsa_indexer_head_dim {c.dsa.head_dim} is below qk_pos_emb_head_dim {rotary}",
            why=f"the first {rotary} channels of an index head are rotary",
            fix=f"set --dsa-indexer-head-dim to at least {rotary}",
        )


def check_block_sparse_attention(c: Settings) -> Errors:
    """Attention to selected blocks of keys and its indexer."""
    model = c.model
    if model.sparse_attention_type != "blocks":
        return
    groups = model.query_groups
    if model.multi_latent_attention:
        yield ConfigError(
            "sparse_attention_type blocks with multi_latent_attention",
            why="its index heads are those of keys and values, and latent attention shares them",
            fix="leave --multi-latent-attention out",
        )
    if model.linear_attention_type is not None or model.hybrid_layer_pattern is not None:
        yield ConfigError(
            "sparse_attention_type blocks with linear_attention_type or hybrid_layer_pattern",
            why="dsa_indexer_layer_freq says which layers select blocks, and all others have "
            "attention",
            fix="leave --linear-attention-type and --hybrid-layer-pattern out",
        )
    if model.num_kv_shared_layers:
        yield ConfigError(
            f"sparse_attention_type blocks with num_kv_shared_layers {model.num_kv_shared_layers}",
            why="a layer that selects blocks reads keys of its own",
            fix="leave --num-kv-shared-layers out",
        )
    if c.dsa.n_heads != groups:
        yield ConfigError(
            f"dsa_indexer_n_heads {c.dsa.n_heads} with {groups} query groups",
            why="the query heads of one key/value head attend to the blocks of one index head",
            fix=f"set --dsa-indexer-n-heads {groups}",
        )
    yield from _check_blocks(c)


def _check_blocks(c: Settings) -> Errors:
    """The sizes of selected blocks."""
    dsa = c.dsa
    if dsa.topk % dsa.block_size != 0:
        yield ConfigError(
            f"dsa_indexer_topk {dsa.topk} is no number of blocks of {dsa.block_size} keys",
            why="blocks are selected as a whole",
            fix=f"set --dsa-indexer-topk {round_up(dsa.topk, dsa.block_size)}",
        )
    if dsa.num_local_blocks > dsa.topk_blocks:
        yield ConfigError(
            f"dsa_indexer_num_local_blocks {dsa.num_local_blocks} of {dsa.topk_blocks} selected "
            "blocks",
            why="the blocks around a query are among the selected ones",
            fix=f"set --dsa-indexer-num-local-blocks to at most {dsa.topk_blocks}",
        )
    rotary = c.model.rotary_dim if c.model.has_rope else 0
    if dsa.head_dim < rotary:
        yield ConfigError(
            f"dsa_indexer_head_dim {dsa.head_dim} is below the {rotary} rotary channels of a head",
            why=f"the first {rotary} channels of an index head are rotary",
            fix=f"set --dsa-indexer-head-dim to at least {rotary}",
        )


def check_sparse_attention_windows(c: Settings) -> Errors:
    """Sparse attention has no windows."""
    model = c.model
    kind = model.sparse_attention_type
    if kind is None or kind == "compressed":
        return
    if model.window_size is not None:
        yield ConfigError(
            f"sparse_attention_type {kind} with window_size {model.window_size}",
            why="an indexer selects the keys of a query in every layer",
            fix="leave --window-size out",
        )
    if model.attention_chunk_size is not None:
        yield ConfigError(
            f"sparse_attention_type {kind} with attention_chunk_size {model.attention_chunk_size}",
            why="an indexer selects the keys of a query in every layer",
            fix="leave --attention-chunk-size out",
        )


def check_multipliers(c: Settings) -> Errors:
    """Check factors on outputs and on the projections of Mamba-2."""
    residual = c.model.residual_multiplier
    mlp_output = c.model.mlp_output_multiplier
    placement = c.model.norm_placement
    kind = c.model.normalization
    if residual * mlp_output != 1 and placement != "pre" and kind != "RMSNorm":
        yield ConfigError(
            f"residual_multiplier {residual} and mlp_output_multiplier {mlp_output} with "
            f"norm_placement {placement} and normalization {kind}",
            why="of the norms of the outputs of attention and MLP, RMSNorm alone has a factor",
            fix="leave --residual-multiplier and --mlp-output-multiplier out, or set "
            "--norm-placement pre or --normalization RMSNorm",
        )
    if len(c.mamba.multipliers) != 5:
        yield ConfigError(
            f"mamba_multipliers has {count_of(len(c.mamba.multipliers), 'number')}",
            why="Mamba-2 has five projections: gate, value, key, query and step",
            fix="set --mamba-multipliers with five numbers",
        )


def check_values_and_norms(c: Settings) -> Errors:
    """Check width of values, norms without weights, and activations with weights."""
    model = c.model
    if c.has_fp8 and model.value_channels is not None:
        yield ConfigError(
            f"fp8 with value_channels {model.value_channels}",
            why="which sizes fp8 can multiply is checked for values as wide as keys",
            fix="leave out --fp8-format or --value-channels",
        )
    if c.has_fp8 and model.attention_output_gate and model.attention_output_gate_per_head:
        yield ConfigError(
            "fp8 with attention_output_gate_per_head",
            why="a projection to one number per head is too narrow for products in fp8",
            fix="leave out --fp8-format or --attention-output-gate-per-head",
        )
    if not model.has_norm_weight and model.norm_placement != "pre":
        norms = f"normalization {model.normalization}"
        cure = "--normalization RMSNorm"
        if model.normalization == "LayerNorm":
            norms = f"layernorm_parameters {model.layernorm_parameters}"
            cure = "--layernorm-parameters weight"
        yield ConfigError(
            f"{norms} with norm_placement {model.norm_placement}",
            why="norms without weights are those of the inputs of attention and MLP",
            fix=f"set {cure} or --norm-placement pre",
        )
    if model.activation == "xielu" and c.has_experts:
        yield ConfigError(
            f"activation xielu with num_experts {c.moe.num_experts}",
            why="its weights are those of dense MLPs, and experts have none",
            fix="choose another --activation or leave --num-experts out",
        )


def check_pattern_length(c: Settings) -> Errors:
    """`hybrid_layer_pattern` has one letter per layer."""
    letters = read_hybrid_pattern(c.model.hybrid_layer_pattern or "")
    if letters and len(letters) != c.model.num_layers:
        yield ConfigError(
            f"hybrid_layer_pattern has {len(letters)} of {count_of(c.model.num_layers, 'layer')}",
            why="every letter is a layer",
            fix=f"set --num-layers {len(letters)} or change --hybrid-layer-pattern",
        )


def check_pattern_letters(c: Settings) -> Errors:
    """Check letters of `hybrid_layer_pattern` that need experts or linear attention."""
    letters = read_hybrid_pattern(c.model.hybrid_layer_pattern or "")
    if "E" in letters and not c.has_experts:
        yield ConfigError(
            "hybrid_layer_pattern has E and num_experts is unset",
            why="E is a layer of experts",
            fix="set --num-experts",
        )
    if "G" in letters and c.model.linear_attention_type is None:
        yield ConfigError(
            "hybrid_layer_pattern has G and linear_attention_type is unset",
            why="G is a layer of linear attention",
            fix="set --linear-attention-type",
        )


def check_attention_letters(c: Settings) -> Errors:
    """Check letters of attention, with and without MLA, and of multi-token prediction."""
    pattern = c.model.hybrid_layer_pattern
    if pattern is None:
        return
    letters = read_hybrid_pattern(pattern)
    if "+" in letters and not c.model.multi_latent_attention:
        yield ConfigError(
            "hybrid_layer_pattern has + and multi_latent_attention is off",
            why="+ is a layer of multi-latent attention",
            fix="set --multi-latent-attention or write *",
        )
    if "*" in letters and c.model.multi_latent_attention:
        yield ConfigError(
            "hybrid_layer_pattern has * and multi_latent_attention is on",
            why="* is attention without it, and a model has one of the two",
            fix="write + or leave --multi-latent-attention out",
        )
    num_mtp_layers = len(read_mtp_patterns(pattern))
    if num_mtp_layers != (c.mtp.num_layers or 0):
        yield ConfigError(
            f"hybrid_layer_pattern has {count_of(num_mtp_layers, 'layer')} of multi-token "
            "prediction",
            why=f"mtp_num_layers is {typed(c.mtp.num_layers)}",
            fix="end --hybrid-layer-pattern with /*E or /*- once per layer of --mtp-num-layers",
        )


def check_delta_rule_heads(c: Settings) -> Errors:
    """Check heads of Gated DeltaNet and KDA."""
    if not c.has_delta_rule:
        return
    num_keys = c.linear.num_key_heads
    num_values = c.linear.num_value_heads
    value_heads = count_of(num_values, "value head")
    key_heads = count_of(num_keys, "key head")
    if num_values % num_keys != 0:
        yield ConfigError(
            f"{value_heads} cannot share {key_heads}",
            why="linear_num_key_heads must divide linear_num_value_heads",
            fix="set --linear-num-key-heads to a divisor",
        )
    if "kda" in c.mixers and num_values > num_keys:
        yield ConfigError(
            f"{value_heads} beside {key_heads}",
            why="linear_attention_type kda has a decay for every channel of the key of a value "
            "head",
            fix=f"set --linear-num-key-heads {num_values}",
        )


def check_linear_layers(c: Settings) -> Errors:
    """`linear_attention_type` needs a layer of its kind."""
    kind = c.model.linear_attention_type
    if kind is not None and not c.has_linear_layers:
        frequency = f"linear_attention_freq is {c.model.linear_attention_freq}"
        has_pattern = bool(c.model.hybrid_layer_pattern)
        yield ConfigError(
            f"no layer has linear_attention_type {kind}",
            why="hybrid_layer_pattern has no G" if has_pattern else frequency,
            fix="leave --linear-attention-type out",
        )


def check_mamba_heads(c: Settings) -> Errors:
    """Check heads and groups of Mamba-2."""
    num_groups = c.mamba.num_groups
    if c.has_mamba and c.model.mamba_heads % num_groups != 0:
        num_heads = c.model.mamba_heads
        yield ConfigError(
            f"{count_of(num_heads, 'head')} of Mamba-2 cannot form {count_of(num_groups, 'group')}",
            why="mamba_num_groups must divide mamba_num_heads, which is "
            "2 * hidden_size / mamba_head_dim if unset",
            fix=f"set --mamba-num-heads {round_up(num_heads, num_groups)} or another "
            "--mamba-num-groups",
        )


def near_hidden_sizes(model: ModelConfig) -> str:
    """The sizes below and above that heads can share; with RoPE a head has an even width."""
    multiple = model.num_attention_heads * (2 if model.has_rope else 1)
    below = model.hidden_size // multiple * multiple
    above = below + multiple
    return f"{below} or {above}" if below else str(above)


def check_heads(c: Settings) -> Errors:
    """Check heads of attention without MLA."""
    model = c.model
    num_heads = model.num_attention_heads
    if model.multi_latent_attention:
        return
    if model.kv_channels is None and model.hidden_size % num_heads != 0:
        yield ConfigError(
            f"hidden_size {model.hidden_size} cannot be split into {num_heads} heads",
            why="num_attention_heads must divide it where kv_channels is unset",
            fix=f"set --hidden-size {near_hidden_sizes(model)}, --num-attention-heads to a divisor "
            "or --kv-channels to the width of a head",
        )
    if num_heads % model.query_groups != 0:
        yield ConfigError(
            f"{num_heads} query heads cannot share {model.query_groups} key/value heads",
            why="num_query_groups must divide num_attention_heads",
            fix="set --num-query-groups to a divisor",
        )


def check_rotated_pairs(c: Settings) -> Errors:
    """RoPE rotates an even number of channels."""
    model = c.model
    why = "RoPE rotates pairs of channels, so their number must be even"
    if model.multi_latent_attention:
        channels = c.mla.qk_pos_emb_head_dim
        if channels % 2 != 0:
            yield ConfigError(
                f"qk_pos_emb_head_dim is {channels}",
                why=why,
                fix=f"set --qk-pos-emb-head-dim {channels + 1}",
            )
        return
    has_pairs = model.rotary_dim > 0 and model.rotary_dim % 2 == 0
    has_whole_heads = model.hidden_size % model.num_attention_heads == 0
    if model.has_rope and not has_pairs and (model.kv_channels is not None or has_whole_heads):
        yield ConfigError(
            f"a head has {model.head_dim} channels, of which {model.rotary_dim} are rotated "
            f"(rotary_percent {model.rotary_percent})",
            why=why,
            fix=f"set --kv-channels {channels_with_pairs(c)}, or another --num-attention-heads or "
            "--rotary-percent",
        )


def channels_with_pairs(c: Settings) -> int:
    """The next number of channels per head of which RoPE rotates an even number."""
    percent = c.model.rotary_percent
    rotated = max(2, round_up(c.model.rotary_dim, 2))
    channels = ceil(rotated / percent)
    if int(channels * percent) < rotated:  # 100 * 0.58 is 57.99 in floating point
        return channels + 1
    return channels


def check_layers_with_positions(c: Settings) -> Errors:
    """A model with rotary positions needs a layer that has them."""
    if c.model.has_rope and all(c.model.no_rope_layers):
        yield ConfigError(
            "no layer has rotary positions",
            why=f"no_rope_freq is {c.model.no_rope_freq}",
            fix="set --no-rope-freq 0, or --position-embedding-type none",
        )


def check_windows(c: Settings) -> Errors:
    """Check sliding windows and chunks of attention."""
    window = c.model.window_size
    chunk = c.model.attention_chunk_size
    if window is not None and chunk is not None:
        yield ConfigError(
            f"window_size {window} with attention_chunk_size {chunk}",
            why="a layer attends to a sliding window or within a chunk, not both",
            fix="leave out --window-size or --attention-chunk-size",
        )
    why = f"window_attn_skip_freq is {c.model.window_attn_skip_freq}"
    if chunk is not None and not any(c.model.window_layers):
        yield ConfigError(
            f"no layer attends within chunks of {chunk} positions",
            why=why,
            fix="set --window-attn-skip-freq 0 or leave --attention-chunk-size out",
        )
    has_compressed = c.model.sparse_attention_type == "compressed"  # every layer has the window
    if window is not None and not has_compressed and not any(c.model.window_layers):
        yield ConfigError(
            f"no layer has the window of {window} keys",
            why=why,
            fix="set --window-attn-skip-freq 0 or leave --window-size out",
        )
