"""Rules of the layout for activation memory and fp8: recomputation, offloading, sizes in fp8."""

from nanotrain.config.rules.settings import Errors, Settings
from nanotrain.config.rules.stages import longest_stage, num_stages
from nanotrain.config.schema import typed
from nanotrain.errors import ConfigError
from nanotrain.quantities import count_of, round_up


def check_recomputed_layers(c: Settings) -> Errors:
    """No more layers are recomputed than the longest stage has."""
    num_layers = c.memory.recompute_num_layers
    if num_layers is not None and num_layers > longest_stage(c):
        yield ConfigError(
            f"recompute_num_layers {num_layers} is above the layers of a stage",
            why=longest_text(c),
            fix=f"set --recompute-num-layers to at most {longest_stage(c)}",
        )


def longest_text(c: Settings) -> str:
    """The longest stage and its layers."""
    return (
        f"the longest of {count_of(num_stages(c), 'pipeline stage')} has {longest_stage(c)} of "
        f"{count_of(c.model.num_layers, 'layer')}"
    )


def check_recomputed_mlps(c: Settings) -> Errors:
    """Recomputed MLPs and norms need layers that have them."""
    modules = c.recomputed_modules
    if "mlp" in modules and not c.has_dense_layers:
        yield ConfigError(
            "recompute_modules mlp has no effect",
            why=f"every layer has experts: moe_layer_freq is {c.moe.layer_freq}",
            fix="leave mlp out of --recompute-modules",
        )
    if "moe" in modules and not c.has_experts:
        yield ConfigError(
            "recompute_modules moe has no effect",
            why="the model has no experts: num_experts is unset",
            fix="leave moe out of --recompute-modules",
        )
    is_post = c.model.norm_placement == "post"
    if "layernorm" in modules and is_post and c.linear.norm_placement in (None, "post"):
        yield ConfigError(
            "recompute_modules layernorm has no effect",
            why="norm_placement is post, and a residual sum keeps no output of a norm",
            fix="leave layernorm out of --recompute-modules",
        )


def check_recomputed_shortcut(c: Settings) -> Errors:
    """A layer with a shortcut recomputes neither experts nor norms."""
    modules = c.recomputed_modules
    if c.moe.shortcut and {"moe", "layernorm", "pointwise"}.intersection(modules):
        yield ConfigError(
            f"recompute_modules {typed(c.memory.recompute_modules)} with moe_shortcut",
            why="moe, layernorm and pointwise would compute the second block of a layer again too",
            fix="leave moe, layernorm and pointwise out of --recompute-modules, or set "
            "--recompute-granularity full",
        )


def check_pointwise_recomputation(c: Settings) -> Errors:
    """Norms and activations of experts are pointwise operators already."""
    modules = c.recomputed_modules
    if "pointwise" not in modules:
        return
    for name in ("layernorm", "moe_act"):
        if name in modules:
            yield ConfigError(
                f"recompute_modules {name} has no effect",
                why=f"pointwise recomputes {name} already",
                fix=f"leave {name} out of --recompute-modules",
            )


def check_recomputed_activations(c: Settings) -> Errors:
    """Check recomputed projections of MLA and activations of experts."""
    modules = c.recomputed_modules
    if "mla_up_proj" in modules and not c.model.multi_latent_attention:
        yield ConfigError(
            "recompute_modules mla_up_proj has no effect",
            why="multi_latent_attention is off",
            fix="leave mla_up_proj out of --recompute-modules",
        )
    if "moe_act" in modules and not c.has_experts:
        yield ConfigError(
            "recompute_modules moe_act has no effect",
            why="the model has no experts: num_experts is unset",
            fix="leave moe_act out of --recompute-modules",
        )
    if "moe" in modules and "moe_act" in modules:
        yield ConfigError(
            "recompute_modules moe_act has no effect",
            why="moe recomputes the whole layer, its activation included",
            fix="leave moe or moe_act out of --recompute-modules",
        )


def check_offloaded_layers(c: Settings) -> Errors:
    """Check layers of a stage whose activations are in host memory."""
    if not c.memory.cpu_offloading:
        return
    num_layers = c.memory.cpu_offloading_num_layers
    longest = longest_stage(c)
    fix = "leave --cpu-offloading out"
    if longest > 1:
        fix = f"set --cpu-offloading-num-layers to at most {longest - 1}"
    if num_layers == 0:
        yield ConfigError(
            "cpu_offloading without layers has no effect",
            why="cpu_offloading_num_layers is 0",
            fix=fix,
        )
    if num_layers >= longest:
        yield ConfigError(
            f"cpu_offloading_num_layers {num_layers} is not below the layers of a stage",
            why=f"{longest_text(c)}, and the backward needs the last one first",
            fix=fix,
        )


def check_recompute_method(c: Settings) -> Errors:
    """A number of recomputed layers needs a method."""
    num_layers = c.memory.recompute_num_layers
    has_method = c.memory.recompute_method is not None
    if c.memory.recompute_granularity == "full" and num_layers is not None and not has_method:
        yield ConfigError(
            f"recompute_num_layers is {num_layers} and recompute_method is unset",
            why="it is the size of a group with uniform, and the number of recomputed layers with "
            "block",
            fix="set --recompute-method uniform or --recompute-method block",
        )


def check_offloading(c: Settings) -> Errors:
    """Errors for settings that exclude the offloading of activations."""
    if not c.memory.cpu_offloading:
        return
    granularity = c.memory.recompute_granularity
    if granularity is not None:
        yield ConfigError(
            f"cpu_offloading with recompute_granularity {granularity}",
            why="an activation is either recomputed or kept in host memory",
            fix="leave out --cpu-offloading or --recompute-granularity",
        )
    if c.train.torch_compile:
        yield ConfigError(
            "cpu_offloading with torch_compile",
            why="compiled code has its own choice of what it saves",
            fix="leave out --cpu-offloading or --torch-compile",
        )
    if c.train.device == "cpu":
        yield ConfigError(
            "cpu_offloading has no effect",
            why="activations on a CPU are in host memory already",
            fix="leave --cpu-offloading out",
        )


def check_fp8_layers(c: Settings) -> Errors:
    """Check layers without fp8 at the ends."""
    num_layers = c.model.num_layers
    at_start = c.fp8.num_layers_at_start_in_bf16
    at_end = c.fp8.num_layers_at_end_in_bf16
    if c.fp8.first_last_layers_bf16 and at_start + at_end >= num_layers:
        yield ConfigError(
            f"{count_of(at_start, 'layer')} at the start and {at_end} at the end of {num_layers} "
            "without fp8",
            why="no layer is left for fp8",
            fix="lower --num-layers-at-start-in-bf16 and --num-layers-at-end-in-bf16, or leave out "
            "--fp8-format",
        )


def check_fp8_sizes(c: Settings) -> Errors:
    """torch multiplies fp8 matrices whose sizes are multiples of 16."""
    if not c.has_fp8:
        return
    if odd := odd_sizes(c):
        name, size = next(iter(odd.items()))
        named = ", ".join(f"{name} is {size}" for name, size in odd.items())
        yield ConfigError(
            f"fp8 matrices have odd sizes: {named}",
            why="torch's fp8 products take matrices whose sizes are multiples of 16",
            fix=f"make each a multiple of 16 ({name}: {round_up(size, 16)}), or leave out "
            "--fp8-format",
        )


def odd_sizes(c: Settings) -> dict[str, int]:
    """The sizes of a rank's fp8 matrices that are not multiples of 16, by name."""
    sizes = {"hidden_size": c.model.hidden_size}
    sizes |= mla_sizes(c) if c.model.multi_latent_attention else attention_sizes(c)
    if c.has_delta_rule:
        key_heads = c.linear.num_key_heads // c.tp
        value_heads = c.linear.num_value_heads // c.tp
        sizes["linear queries per rank: key heads / tp x channels"] = (
            key_heads * c.linear.key_head_dim
        )
        sizes["linear values per rank: value heads / tp x channels"] = (
            value_heads * c.linear.value_head_dim
        )
    if c.has_dense_layers:
        sizes["ffn_hidden_size / tp"] = c.model.ffn_size // c.tp
    if c.has_experts:
        shared_size = c.moe.shared_expert_intermediate_size or 0
        sizes["moe_ffn_hidden_size / etp"] = c.model.moe_ffn_size // c.etp
        sizes["moe_latent_size"] = c.moe.latent_size or 0
        sizes["moe_shared_expert_intermediate_size / tp"] = shared_size // c.tp
    return {name: size for name, size in sizes.items() if size % 16 != 0}


def attention_sizes(c: Settings) -> dict[str, int]:
    """Sizes of the projections of attention on a rank."""
    head_dim = c.model.head_dim
    key_heads = max(1, c.model.query_groups // c.tp)
    return {
        "queries per rank: heads / tp x kv_channels": c.model.num_attention_heads
        // c.tp
        * head_dim,
        "keys per rank: query groups / tp x kv_channels": key_heads * head_dim,
    }


def mla_sizes(c: Settings) -> dict[str, int]:
    """Sizes of the projections of multi-latent attention on a rank, with its indexer."""
    mla = c.mla
    heads = c.model.num_attention_heads // c.tp
    key_value_dim = mla.qk_head_dim + mla.v_head_dim
    sizes = {
        "q_lora_rank": mla.q_lora_rank or 0,
        "kv_lora_rank": mla.kv_lora_rank,
        "kv_lora_rank + qk_pos_emb_head_dim": mla.kv_lora_rank + mla.qk_pos_emb_head_dim,
        "queries per rank: heads / tp x (qk_head_dim + qk_pos_emb_head_dim)": heads
        * c.model.head_dim,
        "keys and values per rank: heads / tp x (qk_head_dim + v_head_dim)": heads * key_value_dim,
        "values per rank: heads / tp x v_head_dim": heads * mla.v_head_dim,
    }
    if c.model.sparse_attention_type == "dsa":
        sizes["index queries: heads x dsa_indexer_head_dim"] = c.dsa.n_heads * c.dsa.head_dim
        sizes["dsa_indexer_head_dim"] = c.dsa.head_dim
    return sizes
