"""Entries of config.json about experts, as parts (parts.py).

expert_layers        the pattern of the layers with experts, which most of the others set

qwen_experts         experts in every Nth layer but some, top-k before or after the softmax
deepseek_experts     the first layers without experts, groups, shared experts
hunyuan_experts      experts in all layers
ernie_layers         experts in every Nth layer of a range
mimo                 experts in all layers but the first, more key/value heads with a window
dense_first_layers   the first layers without experts
mlp_layer_types      a list that says which layers have experts
shared_experts, granite_shared_expert, router_groups, router_losses, normalized_weights
"""

from functools import partial
from typing import Any

from nanotrain.config.model import ModelConfig, MoEConfig
from nanotrain.config.notation import write_pattern
from nanotrain.interop.hf.canonical import resolved
from nanotrain.interop.hf.layout import Part, Raw, Values, reject


def expert_layers(layers: tuple[bool, ...]) -> Values:
    """The values for the layers with experts; where all have them, none has a dense MLP."""
    values: Values = {"moe.layer_freq": write_pattern(layers)}
    if all(layers):
        values["ffn_hidden_size"] = None
    return values


def layers_with_experts(model_config: ModelConfig) -> list[int]:
    """Numbers of the layers with experts."""
    return [layer for layer, has_experts in enumerate(model_config.moe_layers) if has_experts]


def _read_qwen(raw: Raw) -> Values:
    dense = set(raw.get("mlp_only_layers") or ())
    step = raw.get("decoder_sparse_step", 1)
    layers = []
    for layer in range(raw["num_hidden_layers"]):
        layers.append(layer not in dense and (layer + 1) % step == 0)
    if not any(layers):
        reject("num_experts", raw["num_experts"], instead="above 0, with experts in some layer,")
    return _read_normalized(raw) | expert_layers(tuple(layers))


def _write_qwen(model_config: ModelConfig) -> Values:
    layers = enumerate(model_config.moe_layers)
    dense = [layer for layer, has_experts in layers if not has_experts]
    entries: Values = {"decoder_sparse_step": 1, "mlp_only_layers": dense}
    return entries | _write_normalized(model_config)


def _read_normalized(raw: Raw) -> Values:
    return {"moe.router_pre_softmax": not raw.get("norm_topk_prob", False)}


def _write_normalized(model_config: ModelConfig) -> Values:
    moe = model_config.moe or MoEConfig()
    return {"norm_topk_prob": not moe.router_pre_softmax}


def _write_losses(model_config: ModelConfig) -> Values:
    # transformers multiplies by top-k and takes the mean over layers, where the layers are summed
    # here
    moe = model_config.moe or MoEConfig()
    num_layers = sum(model_config.moe_layers)
    coefficient = sum(moe.aux_loss_coeff) * num_layers / moe.router_topk
    return {"output_router_logits": False, "router_aux_loss_coef": coefficient}


def _read_deepseek(raw: Raw) -> Values:
    values = read_dense_first(raw)
    values |= _read_groups(raw)
    values |= _read_shared(raw)
    num_mtp_layers = raw.get("num_nextn_predict_layers")
    if num_mtp_layers:
        values["mtp.num_layers"] = num_mtp_layers
    return values


def _write_deepseek(model_config: ModelConfig) -> Values:
    entries = write_dense_first(model_config)
    entries |= _write_shared(model_config)
    entries["num_nextn_predict_layers"] = model_config.mtp.num_layers or 0
    return entries | _write_groups(model_config)


def read_dense_first(raw: Raw, *, entry: str = "first_k_dense_replace") -> Values:
    """The layers with experts: all after the first layers, whose number is the entry."""
    num_dense = raw[entry] or 0
    layers = tuple(layer >= num_dense for layer in range(raw["num_hidden_layers"]))
    if not any(layers):
        reject(entry, raw[entry], instead=f"below {len(layers)}")
    return expert_layers(layers)


def write_dense_first(model_config: ModelConfig, *, entry: str = "first_k_dense_replace") -> Values:
    """The number of first layers without experts."""
    sparse = layers_with_experts(model_config)
    return {entry: sparse[0] if sparse else len(model_config.moe_layers)}


def _read_shared(raw: Raw) -> Values:
    num_shared = raw["n_shared_experts"] or 0
    size = num_shared * raw["moe_intermediate_size"]
    return {"moe.shared_expert_intermediate_size": size} if size else {}


def _write_shared(model_config: ModelConfig) -> Values:
    return {"n_shared_experts": write_num_shared(model_config)}


def write_num_shared(model_config: ModelConfig) -> int:
    """The number of shared experts, as wide as a routed expert."""
    moe = resolved(model_config).moe or MoEConfig()
    return (moe.shared_expert_intermediate_size or 0) // (moe.ffn_hidden_size or 1)


def _read_granite_shared(raw: Raw) -> Values:
    """Granite: the width of the shared expert; 0 without one."""
    size = raw["shared_intermediate_size"]
    return {"moe.shared_expert_intermediate_size": size} if size else {}


def _write_granite_shared(model_config: ModelConfig) -> Values:
    moe = model_config.moe or MoEConfig()
    return {"shared_intermediate_size": moe.shared_expert_intermediate_size or 0}


def _read_groups(raw: Raw) -> Values:
    """Groups of experts to route within: their number, and the number per token."""
    num_groups = _read_group_count(raw, "n_group")
    group_topk = _read_group_count(raw, "topk_group")
    topk = raw["num_experts_per_tok"]
    if num_groups <= 1:
        return {}
    # transformers ranks a group by its two best experts
    if topk // group_topk != 2:
        expected = f"{2 * group_topk}, two per group that a token may use,"
        reject("num_experts_per_tok", topk, instead=expected)
    return {"moe.router_num_groups": num_groups, "moe.router_group_topk": group_topk}


def _read_group_count(raw: Raw, entry: str) -> Any:
    count = raw[entry]
    if count == 0:
        reject(entry, count, instead="null or at least 1")
    return count or 1


def _write_groups(model_config: ModelConfig) -> Values:
    moe = model_config.moe or MoEConfig()
    return {"n_group": moe.router_num_groups or 1, "topk_group": moe.router_group_topk or 1}


def read_mlp_types(raw: Raw) -> Values:
    """The layers with experts as a list of kinds; nothing where config.json has none."""
    kinds = raw.get("mlp_layer_types")
    if kinds is None:
        return {}
    return expert_layers(tuple(kind == "sparse" for kind in kinds))


def _write_mlp_types(model_config: ModelConfig) -> Values:
    layers = model_config.moe_layers
    return {"mlp_layer_types": ["sparse" if has_experts else "dense" for has_experts in layers]}


def _read_mimo(raw: Raw) -> Values:
    """Layers with a window have twice as many key/value heads; null is 1 in two factors."""
    num_layers = raw["num_hidden_layers"]
    kinds = raw.get("mlp_layer_types") or ["dense"] + ["sparse"] * (num_layers - 1)
    values = read_mlp_types({"mlp_layer_types": kinds})
    value_scale = raw["attention_value_scale"]
    scaling = raw["routed_scaling_factor"]
    values["attention_output_multiplier"] = 1.0 if value_scale is None else value_scale
    values["moe.router_topk_scaling_factor"] = 1.0 if scaling is None else scaling
    values["window_query_groups"] = 2 * raw["num_key_value_heads"]
    window = raw.get("sliding_window_size")
    if window is not None:
        values["window_size"] = window
    return values


def _write_mimo(model_config: ModelConfig) -> Values:
    factor = model_config.attention_output_multiplier
    return {"attention_value_scale": factor} | _write_mlp_types(model_config)


def _read_ernie(raw: Raw) -> Values:
    """ERNIE: every `moe_layer_interval`-th layer from start to end index has experts."""
    step = raw["moe_layer_interval"]
    first = raw["moe_layer_start_index"]
    last = raw["moe_layer_end_index"]
    num_layers = raw["num_hidden_layers"]
    if last == -1:
        last = num_layers - 1
    layers = []
    for layer in range(num_layers):
        layers.append((layer + 1) % step == 0 and first <= layer <= last)
    if not any(layers):
        reject("moe_layer_start_index", first, instead=f"at most {last}")
    return expert_layers(tuple(layers))


def _write_ernie(model_config: ModelConfig) -> Values:
    sparse = layers_with_experts(model_config) or [0]
    return {
        "moe_layer_interval": 1,
        "moe_layer_start_index": sparse[0],
        "moe_layer_end_index": sparse[-1],
    }


def _read_hunyuan(raw: Raw) -> Values:
    stored = raw["num_experts_per_tok"]
    topk, *others = stored if isinstance(stored, list) else [stored]
    if any(other != topk for other in others):
        reject("moe_topk", stored, instead="one number for all layers")
    values = expert_layers((True,) * raw["num_hidden_layers"])
    values["moe.router_topk"] = topk
    values["moe.shared_expert_intermediate_size"] = raw["intermediate_size"]
    return values


def _write_hunyuan(model_config: ModelConfig) -> Values:
    moe = model_config.moe or MoEConfig()
    return {"num_experts_per_tok": moe.router_topk}


EXPERT_PARTS: dict[str, Part] = {
    "qwen_experts": Part(_read_qwen, _write_qwen),
    "deepseek_experts": Part(_read_deepseek, _write_deepseek),
    "hunyuan_experts": Part(_read_hunyuan, _write_hunyuan),
    "ernie_layers": Part(_read_ernie, _write_ernie),
    "mimo": Part(_read_mimo, _write_mimo),
    "dense_first_layers": Part(
        partial(read_dense_first, entry="num_dense_layers"),
        partial(write_dense_first, entry="num_dense_layers"),
    ),
    "mlp_layer_types": Part(read_mlp_types, _write_mlp_types),
    "shared_experts": Part(_read_shared, _write_shared),
    "granite_shared_expert": Part(_read_granite_shared, _write_granite_shared),
    "router_groups": Part(_read_groups, _write_groups),
    "router_losses": Part(write=_write_losses),
    "normalized_weights": Part(_read_normalized, _write_normalized),
}
