"""Rules of fp8: its data types, its layers, and the sizes of its matrix products."""

from nanotrain.config.config import DType, Fp8Format
from nanotrain.config.option import flag_of
from nanotrain.config.rules.rule import Rule, Values
from nanotrain.quantities import count_of, round_up

ALIGNMENT = 16  # torch's fp8 products take matrices whose sizes are multiples of this
SCALED_ALONG_ROWS = ("rowwise", "mxfp8")  # as in precision/fp8.py: a transposed weight has other scales
E4M3_ONLY = ("blockwise", "mxfp8")  # as in precision/fp8.py: torch has kernels with e4m3 operands only


def odd_sizes(v: Values) -> list[tuple[str, int]]:
    """The sizes of a rank's fp8 matrices that are no multiple of 16, with their names."""
    mla, tp = v.config.model.mla, v.tp
    sizes = [("hidden_size", v.hidden_size)]
    if mla is not None:
        heads = v.num_attention_heads // tp
        sizes += [
            ("q_lora_rank", mla.q_lora_rank or 0),
            ("kv_lora_rank", mla.kv_lora_rank),
            ("kv_lora_rank + qk_pos_emb_head_dim", mla.kv_lora_rank + mla.qk_pos_emb_head_dim),
            ("queries per rank: heads / tp x (qk_head_dim + qk_pos_emb_head_dim)", heads * v.head_dim),
            (
                "keys and values per rank: heads / tp x (qk_head_dim + v_head_dim)",
                heads * (mla.qk_head_dim + mla.v_head_dim),
            ),
            ("values per rank: heads / tp x v_head_dim", heads * mla.v_head_dim),
        ]
    else:
        sizes += [
            ("queries per rank: heads / tp x kv_channels", v.num_attention_heads // tp * v.head_dim),
            ("keys per rank: query groups / tp x kv_channels", max(1, v.query_groups // tp) * v.head_dim),
        ]
    if not all(v.moe_layers):
        sizes.append(("ffn_hidden_size / tp", v.ffn_size // tp))
    if v.has_experts:
        sizes.append(("moe_ffn_hidden_size / etp", v.moe_ffn_size // v.etp))
        sizes.append(("moe_shared_expert_intermediate_size / tp", (v.moe_shared_expert_intermediate_size or 0) // tp))
    return [(name, size) for name, size in sizes if size % ALIGNMENT]


def odd_text(v: Values) -> str:
    """The odd sizes, each with its number."""
    return "fp8 matrices have odd sizes: " + ", ".join(f"{name} is {size}" for name, size in odd_sizes(v))


def odd_fix(v: Values) -> str:
    """The nearest multiple of the first of them."""
    name, size = odd_sizes(v)[0]
    return f"make each a multiple of {ALIGNMENT} ({name}: {round_up(size, ALIGNMENT)}), or leave out --fp8-format"


# fmt: off
FP8_RULES = (
    Rule(lambda v: v.params_dtype is DType.fp16, "fp8_format with params_dtype fp16",
        "the results of fp8 products are bf16 or fp32; a dynamic loss scale would change the scales of every step",
        "set --bf16 or leave out --fp8-format"),
    Rule(lambda v: v.fp8_recipe in E4M3_ONLY and v.fp8_format is Fp8Format.hybrid,
        "fp8_recipe {fp8_recipe} with fp8_format hybrid", "torch multiplies such blocks in e4m3 only",
        "set --fp8-format e4m3 or another --fp8-recipe"),
    Rule(lambda v: v.fp8_param_gather and v.fp8_recipe in SCALED_ALONG_ROWS,
        "fp8_param_gather with fp8_recipe {fp8_recipe}",
        "fprop and dgrad scale a weight along other dims, so that two fp8 copies, as many bytes as bf16, would be sent",
        "set --fp8-recipe tensorwise, delayed or blockwise, or leave out --fp8-param-gather"),
)

FP8_LAYOUT_RULES = (
    Rule(lambda v: v.first_last_layers_bf16
        and v.num_layers_at_start_in_bf16 + v.num_layers_at_end_in_bf16 >= v.num_layers,
        lambda v: f"{count_of(v.num_layers_at_start_in_bf16, 'layer')} at the start and "
        f"{v.num_layers_at_end_in_bf16} at the end of {v.num_layers} without fp8",
        "no layer is left for fp8",
        f"lower {flag_of('num_layers_at_start_in_bf16')} and {flag_of('num_layers_at_end_in_bf16')}, "
        "or leave out --fp8-format"),
    Rule(odd_sizes, odd_text, f"torch's fp8 products take matrices whose sizes are multiples of {ALIGNMENT}", odd_fix),
)
# fmt: on
