"""A row of families.yaml from what a folder says: one rule per feature.

    derive_row    the findings of a folder, with the row, its alternatives and what is missing
    RULES         the rules, in their order

A rule reads entries, tensors and code, and writes tables of the row. `table_of("fixed")` and the
like are those of families.yaml, whose head describes them.
"""

import re
from typing import Any

from nanotrain.interop.hf.derive.experts import add_experts
from nanotrain.interop.hf.derive.findings import NEEDED, STANDARD, Findings
from nanotrain.interop.hf.derive.module_names import add_names
from nanotrain.interop.hf.derive.source import block_order
from nanotrain.interop.hf.derive.tensors import last_part
from nanotrain.untrusted import shown

# activation in the code -> activation in nanotrain, for an MLP with a gate and without
GATED = {
    "silu": "swiglu",
    "swish": "swiglu",
    "gelu_pytorch_tanh": "geglu_tanh",
    "gelu_new": "geglu_tanh",
}
PLAIN = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
    "relu2": "squared_relu",
    "xielu": "xielu",
}
# entries whose value is a setting, whatever the family
SETTINGS = {
    "attention_multiplier": "softmax_scale",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "embedding_multiplier": "embedding_multiplier",
    "final_logit_softcapping": "final_logit_softcapping",
    "logits_scaling": "logits_scaling",
    "qk_layernorm": "qk_layernorm",
    "residual_multiplier": "residual_multiplier",
    "use_qk_norm": "qk_layernorm",
}
# norms of a block by its order: n norm, a attention, m MLP, + addition
LETTERS = {"norm": "n", "attention": "a", "mlp": "m", "add": "+"}
ORDERS = {
    "na+nm+": ("pre", ("attention_norm", "mlp_norm")),
    "an+mn+": ("post", ("attention_post_norm", "mlp_post_norm")),
    "nan+nmn+": (
        "sandwich",
        ("attention_norm", "attention_post_norm", "mlp_norm", "mlp_post_norm"),
    ),
    "nam+": ("parallel_shared", ("input_norm",)),
    "nanm+": ("parallel", ("attention_norm", "mlp_norm")),
}
DEFAULT_SCALE = re.compile(
    r"head_dim ?\*\* ?\(?-0\.5\)?$|1(\.0)? / math\.sqrt\(self\.\w*head_dim\)|yarn_apply_mscale"
)


def add_sizes(f: Findings) -> None:
    """Sizes, by the entries of Llama or by other names of them."""
    renamed = f.table_of("renamed")
    for entry in STANDARD:
        name = f.name_of(entry)
        if name != entry:
            renamed[entry] = name
    for entry in NEEDED:
        if f.size(entry) is None:
            names = ", ".join((entry, *STANDARD.get(entry, ())))
            f.lack(f"an entry of config.json for {entry}", asked_by=f"none of {names} is there")


def add_attention(f: Findings) -> None:
    """Heads of their own, or compressed queries, keys and values."""
    has_mla = any(stem.endswith("kv_a_proj_with_mqa") for stem in f.table.stems)
    if not has_mla:
        f.row["from"] = ["llama_layout"]
        if f.entries.get("multi_query"):
            f.require("multi_query", True)
            f.fix("num_query_groups", 1)
        return
    if "rope_interleave" in f.entries:
        f.require("rope_interleave", True)
    f.row["from"] = ["llama_without_heads", "deepseek_mla"]
    f.require("attention_bias", False)
    if f.entries.get("head_dim") == f.entries.get("qk_rope_head_dim"):
        f.row["passed_over"] = ["head_dim"]  # another name of it


def add_norms(f: Findings) -> None:
    """The kind of the norms, their epsilon, and their places in a block."""
    order = [] if f.source is None else block_order(f.source)
    letters = "".join(LETTERS[kind] for kind, _ in order)
    if f.source is not None and letters not in ORDERS:
        names = " ".join(name or "+" for _, name in order)
        f.lack("a block of this order", asked_by=names or "no class with norms and attention")
        return
    placement, modules = ORDERS[letters or "na+nm+"]
    attributes = [name for kind, name in order if kind == "norm"]
    f.norms = dict(zip(attributes, modules, strict=False))
    if placement.startswith("parallel"):
        f.fix("residual_type", "parallel")
        if placement == "parallel_shared":
            f.fix("parallel_shared_norm", True)
    elif placement == "sandwich" and f.has("use_post_norm"):
        f.add_part("hyperclovax")
    elif placement != "pre":
        f.fix("norm_placement", placement)
    if f.source is None:
        _require_epsilon(f, "rms_norm_eps", code="config.rms_norm_eps")
        return
    for attribute in attributes[:1]:
        _add_norm_kind(f, f.source.constructor(attribute))


def _add_norm_kind(f: Findings, constructor: str) -> None:
    """RMSNorm or LayerNorm, the entry of its epsilon, and weights about 0."""
    assert f.source is not None
    epsilon = re.search(r"eps=(?:self\.)?config\.(\w+)", constructor)
    if epsilon and epsilon[1] != "rms_norm_eps":
        f.table_of("renamed")["rms_norm_eps"] = epsilon[1]
    name = constructor.partition("(")[0]
    text = f.source.texts.get(name, "")
    _require_epsilon(f, epsilon[1] if epsilon else "rms_norm_eps", code=constructor + text)
    if re.search(r"nn\.LayerNorm|layer_norm\(| - mean", constructor + text):
        f.fix("normalization", "LayerNorm")
    if re.search(r"1(\.0)? \+ self\.weight|self\.weight \+ 1", text):
        f.fix("apply_layernorm_1p", True)


def _require_epsilon(f: Findings, entry: str, *, code: str) -> None:
    """Note a missing epsilon of norms, in a family that cannot be compared with transformers."""
    if f.configuration is None:
        return
    if entry not in f.entries or not re.search(rf"config\.{entry}\b", code):
        f.lack("an entry for the epsilon of norms", asked_by=code.partition("\n")[0])


def add_activation(f: Findings) -> None:
    """The activation, with a gate or without."""
    entry = f.name_of("hidden_act")
    value = f.entries.get(entry)
    modules = f.row["layers"]
    has_gate = any(module in modules for module in ("mlp.gate", "mlp.experts.gate"))
    known = GATED if has_gate else PLAIN
    if value not in known:
        gate = "with a gate" if has_gate else "without a gate"
        f.lack(f"the activation {shown(value)} of an MLP {gate}", asked_by=f.place_of(entry))
        return
    f.require("hidden_act", value)
    if known[value] != "swiglu":
        f.fix("activation", known[value])


def add_biases(f: Findings) -> None:
    """Biases of queries, keys and values, of the output of attention, and of MLPs."""
    if "deepseek_mla" in f.row["from"]:
        return
    inputs = _bias_of(f, "attention.query")
    output = _bias_of(f, "attention.output")
    mlp = _bias_of(f, "mlp.up") if "mlp.up" in f.row["layers"] else _bias_of(f, "mlp.shared.up")
    entries = f.table_of("entries")
    match inputs, output, mlp:
        case ("", "", ""):
            return
        case ("True", "True", "True"):
            f.fix("add_bias_linear", True)
        case ("True", "", ""):
            f.fix("add_qkv_bias", True)
        case ("", "", "True"):
            f.fix("add_mlp_bias", True)
        case ("attention_bias", "attention_bias", "mlp_bias"):
            f.add_part("llama_biases")
        case (first, second, third) if first == second == third:
            entries[first] = "add_bias_linear"
        case (first, "", _) if first not in ("", "True"):
            entries[first] = "add_qkv_bias"
            _require_none(f, mlp)
        case _:
            for entry in (inputs, output, mlp):
                _require_none(f, entry)


def _bias_of(f: Findings, module: str) -> str:
    """The entry that decides about a bias, "True" for one in all models, or ""."""
    name = f.row["layers"].get(module)
    stem = name["name"] if isinstance(name, dict) else name
    if stem is None:
        return ""
    leaf = stem.rpartition(".")[2]
    found = f.source.biases(leaf) if f.source is not None else set()
    entries = {text.removeprefix("config.") for text in found if text.startswith("config.")}
    if entries:
        return sorted(entries)[0]
    return "True" if f.table.has_bias(stem) else ""


def _require_none(f: Findings, entry: str) -> None:
    """Support only models without these biases."""
    if entry == "":
        return
    if entry == "True" or f.entries.get(entry):
        where = "all models of the class" if entry == "True" else f.place_of(entry)
        f.lack("biases of some matrices of a layer only", asked_by=where)
    else:
        f.require(entry, False)


def add_positions(f: Findings) -> None:
    """Rotary positions: their pairs, the rotated share, their base by layer."""
    if any("wpe" in name for name in f.table.ends):
        f.fix("position_embedding_type", "learned_absolute")
        return
    rope = f.entries.get("rope_parameters") or f.entries.get("rope_scaling") or {}
    has_kinds = isinstance(rope, dict) and any(isinstance(value, dict) for value in rope.values())
    if f.source is not None and "rotary" not in f.code.lower():
        f.fix("position_embedding_type", "none")
    elif has_kinds:
        f.add_part("rope_by_kind")
    elif "partial_rotary_factor" in f.code or "rotary_pct" in f.code:
        f.add_part("partial_rope")
    else:
        f.add_part("rope")
    if f.has("layer_rope_theta"):
        f.add_part("layer_bases")


def add_scores(f: Findings) -> None:
    """The scale of scores, norms of queries and keys, sinks and gates."""
    scale = re.search(r"self\.(?:scaling|scale|softmax_scale) = (.+)", f.attention_code)
    expression = scale[1].partition(" if ")[0].strip() if scale else ""
    if "query_pre_attn_scalar" in expression:
        f.add_part("softmax_scale")
    elif expression and "attention_multiplier" not in expression:
        _require_default_scale(f, expression)
    _add_query_norm(f)
    modules = f.row["layers"]
    if "attention.softmax_offset" in modules:
        f.fix("softmax_type", "learnable")
    if "attention.gate" in modules:
        f.fix("attention_output_gate", True)


def _require_default_scale(f: Findings, expression: str) -> None:
    if not DEFAULT_SCALE.search(expression):
        f.lack("this scale of attention scores", asked_by=expression)


def _add_query_norm(f: Findings) -> None:
    """Norms of queries and keys: per head or over all heads, before or after the rotation."""
    name = f.row["layers"].get("attention.query_norm")
    if name is None:
        return
    shape = f.table.stems[name]
    if not any(f.has(entry) for entry, key in SETTINGS.items() if key == "qk_layernorm"):
        f.fix("qk_layernorm", True)
    head_dim = f.entries.get("head_dim") or f.size("hidden_size") // f.size("num_attention_heads")
    if shape[0] != head_dim:
        f.fix("qk_layernorm_across_heads", True)
    rotation = f.attention_code.find("apply_rotary_pos_emb(")
    norm = f.attention_code.find(f"self.{last_part(name)}(")
    if 0 <= rotation < norm:
        f.fix("qk_layernorm_after_rope", True)


def add_windows(f: Findings) -> None:
    """A window in all layers, or in some; rotary positions in these alone."""
    if not f.has("sliding_window"):
        return
    if f.has("layer_types"):
        f.add_part("layer_windows")
    else:
        f.add_part("window")
    condition = r"if self\.(is_local_attention|is_sliding|sliding_window)( is not None)?:\n"
    if re.search(condition + r"(?:.*\n){0,2}.*apply_rotary", f.attention_code):
        f.add_part("rope_in_windows")


def add_settings(f: Findings) -> None:
    """Entries whose value is a setting, and the scale of embeddings."""
    entries = f.table_of("entries")
    for entry, key in SETTINGS.items():
        if f.has(entry):
            entries[entry] = key
    if re.search(r"\) \* self\.config\.logits_scaling", f.code):
        entries.pop("logits_scaling", None)
        f.add_part("hyperclovax")
    scale = re.search(r"hidden_size ?\*\* ?0\.5", f.code)
    if scale is None:
        return
    switch = re.search(r"if self\.config\.(\w+):\n.*hidden_size ?\*\* ?0\.5", f.code)
    if switch:
        entries[switch[1]] = "scale_embeddings"
    else:
        f.fix("scale_embeddings", True)


RULES: tuple[Any, ...] = (
    add_sizes,
    add_attention,
    add_norms,
    add_names,
    add_activation,
    add_biases,
    add_positions,
    add_scores,
    add_windows,
    add_experts,
    add_settings,
)


def derive_row(f: Findings) -> bool:
    """Derive the row; the findings list everything that nanotrain lacks.

    Returns:
        Whether all rules were applied: without sizes or the order of a block most have no meaning.
    """
    f.row["architecture"] = f.architecture
    f.row["parts"] = []
    if "pad_token_id" in f.entries:
        # transformers trains no embedding of a token that pads
        f.row["written"] = {"pad_token_id": None}
    for rule in RULES:
        rule(f)
        if f.missing and rule in (add_sizes, add_norms):
            return False
    return True
