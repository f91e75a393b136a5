"""The rule for routers and experts of a row.

add_experts   sizes, scores, layers with experts, shared experts
"""

import re

from nanotrain.interop.hf.derive.findings import Findings

SUM = re.compile(r"\.sum\([^)]*\)")
EPSILON = re.compile(r"\.sum\([^)]*\)\)? \+ ([0-9.e-]+)")
PLAIN_EPSILON = 1e-20  # of sigmoid scores, the default of nanotrain
# a list or a number of layers with experts -> the part that reads it
LAYER_PARTS = {
    "mlp_layer_types": "mlp_layer_types",
    "num_dense_layers": "dense_first_layers",
    "mlp_only_layers": "qwen_experts",
}
# what the code of a router does with scores
SOFTMAX = re.compile(r"softmax\(")
TOPK = re.compile(r"topk\(")


def add_experts(f: Findings) -> None:
    """Experts: their number, sizes, router, and the layers that have them."""
    if "mlp.experts.up" not in f.row["layers"]:
        return
    entries = f.table_of("entries")
    entries[f.name_of("num_experts")] = "moe.num_experts"
    entries[f.name_of("num_experts_per_tok")] = "moe.router_topk"
    entries[_width_entry(f)] = "moe.ffn_hidden_size"
    f.add_part("router_losses")
    _add_router(f)
    _add_layers(f)
    _add_shared(f)


def _width_entry(f: Findings) -> str:
    """The entry with the width of an expert."""
    if f.has("moe_intermediate_size"):
        return "moe_intermediate_size"
    return f.name_of("intermediate_size")


def _router_code(f: Findings) -> str:
    """The code of the classes that choose experts."""
    if f.source is None:
        return ""
    texts = [text for text in f.source.texts.values() if TOPK.search(text)]
    return "\n".join(texts)


def _add_router(f: Findings) -> None:
    """Scores, their normalization, and the expert bias."""
    code = _router_code(f)
    entries = f.table_of("entries")
    scale = f.name_of("routed_scaling_factor")
    if f.has(scale):
        entries[scale] = "moe.router_topk_scaling_factor"
    if "mlp.router.expert_bias" in f.row["layers"]:
        f.fix("moe.router_enable_expert_bias", True)
    if f.has("n_group"):
        f.add_part("router_groups")
    if "sigmoid(" in code:
        _add_sigmoid(f, code)
    elif f.has("norm_topk_prob"):
        f.add_part("normalized_weights")
    elif _is_softmax_first(code) and not SUM.search(code):
        f.fix("moe.router_pre_softmax", True)


def _add_sigmoid(f: Findings, code: str) -> None:
    """Sigmoid scores, which nanotrain divides by their sum."""
    f.fix("moe.router_score_function", "sigmoid")
    if f.has("norm_topk_prob"):
        f.require("norm_topk_prob", True)
        if not f.entries["norm_topk_prob"]:
            f.lack("sigmoid scores that are not normalized", asked_by=f.place_of("norm_topk_prob"))
    elif not SUM.search(code):
        f.lack("sigmoid scores that are not normalized", asked_by="the code of the router")
    epsilon = EPSILON.search(code)
    value = float(epsilon[1]) if epsilon else 0.0
    if value != PLAIN_EPSILON:
        f.fix("moe.router_norm_epsilon", value)


def _is_softmax_first(code: str) -> bool:
    """Whether a softmax over all experts comes before the choice."""
    softmax = SOFTMAX.search(code)
    topk = TOPK.search(code)
    return softmax is not None and topk is not None and softmax.start() < topk.start()


def _add_layers(f: Findings) -> None:
    """The layers with experts."""
    if f.has("first_k_dense_replace"):
        f.table_of("renamed")["num_dense_layers"] = "first_k_dense_replace"
        f.add_part("dense_first_layers")
        return
    for entry, part in LAYER_PARTS.items():
        if f.has(entry):
            f.add_part(part)


def _add_shared(f: Findings) -> None:
    """The width of shared experts, or their number."""
    layers = f.row["layers"]
    if "mlp.shared.up" not in layers:
        return
    entries = f.table_of("entries")
    if "mlp.shared_gate" in layers:
        f.fix("moe.shared_expert_gate", True)
    number = f.name_of("n_shared_experts")
    if number in f.entries:
        f.add_part("shared_experts")
        width = _width_entry(f)
        if width != "moe_intermediate_size":
            f.table_of("renamed")["moe_intermediate_size"] = width
    elif "shared_intermediate_size" in f.entries:
        f.add_part("granite_shared_expert")
    elif "shared_expert_intermediate_size" in f.entries:
        entries["shared_expert_intermediate_size"] = "moe.shared_expert_intermediate_size"
    else:
        f.lack(
            "an entry for the width of the shared expert",
            asked_by=f"tensor {layers['mlp.shared.up']}",
        )
