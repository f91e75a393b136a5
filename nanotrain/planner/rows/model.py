"""The model section of a row: its sizes, those of a published model, and assumptions."""

import re
from collections.abc import Mapping
from typing import Any

from nanotrain.errors import ConfigError
from nanotrain.planner.rows.row import Row, read_data

# columns by which a published model is found
SIZES = ("hidden", "heads", "ffn", "experts", "topk")
GATED = {"activation": "swiglu", "normalization": "RMSNorm", "position_embedding_type": "rope"}
UNGATED = {
    "activation": "gelu_tanh",
    "normalization": "LayerNorm",
    "position_embedding_type": "learned_absolute",
}

PublishedModel = Mapping[str, Any]  # a row of models.yaml


def published_model(row: Row) -> PublishedModel:
    """The published model with the sizes of a row; empty without one."""
    sizes = {column: row.number(column) for column in SIZES}
    kv_heads = row.text("kv_heads")
    models = []
    for model in read_data("models"):
        has_sizes = all(model.get(column) == size for column, size in sizes.items())
        contradicts = kv_heads.isdigit() and kv_heads != str(model.get("kv", kv_heads))
        if has_sizes and not contradicts:
            models.append(model)
    layers = row.required("layers")
    return min(models, key=lambda model: abs(model["layers"] - layers), default={})


def model_settings(row: Row, published: PublishedModel, *, engine: str) -> dict[str, Any]:
    """Settings of the model section.

    Args:
        row: the row.
        published: the published model of the same sizes.
        engine: name of the training program.
    """
    hidden = row.required("hidden")
    settings = published.get("settings", {})
    heads = row.number("heads") or row.assume(
        max(1, hidden // 128), "heads not stated: 128 channels each"
    )
    if "kv_channels" not in settings and hidden % heads:
        raise ConfigError(f"{heads} heads do not divide hidden {hidden}")
    groups = _num_query_groups(row, published, heads=heads)
    ffn = row.number("ffn") or row.assume(4 * hidden, "ffn not stated: 4 x hidden")
    looks_gated = engine == "nanotron" or groups < heads or ffn != 4 * hidden
    looks_tied = re.search(r"\btied", row.words("overlap_flags", "note")) is not None
    values = {
        "num_layers": row.number("layers"),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_query_groups": groups,
        "vocab_size": row.number("vocab"),
        "ffn_hidden_size": ffn,
        "max_position_embeddings": row.number("seq"),
        "untie_embeddings_and_output_weights": not published.get("tied", looks_tied),
    }
    values |= GATED if published.get("gated", looks_gated) else UNGATED
    values |= settings
    if row.number("experts"):
        values |= _expert_settings(row, published, ffn=ffn)
    return values


def _num_query_groups(row: Row, published: PublishedModel, *, heads: int) -> int:
    """Key/value heads; MLA has as many as query heads."""
    is_mla = "multi_latent_attention" in published.get("settings", {})
    if is_mla or row.text("kv_heads") == "mla":
        return heads
    return row.number("kv_heads") or published.get("kv") or heads


def _expert_settings(row: Row, published: PublishedModel, *, ffn: int) -> dict[str, Any]:
    """Settings of the model section that concern experts, of the width `ffn`."""
    layers = row.required("layers")
    topk = row.required("topk")
    settings = published.get("settings", {})
    num_dense = _num_dense_layers(layers, published)
    shared = settings.get("moe.shared_expert_intermediate_size")
    dense_ffn = published.get("dense_ffn", ffn * (topk + 1 if shared else topk))
    if not published:
        row.assumed.append(
            "no published model has these sizes: all layers with experts, none shared"
        )
    elif "dense" in published or shared:
        dense = f"{num_dense} dense layers of ffn {dense_ffn}"
        row.assumed.append(f"{dense} and shared expert of {shared}, as published")
    frequency = f"[0]*{num_dense}+[1]*{layers - num_dense}"
    return {
        "ffn_hidden_size": dense_ffn,
        "moe.num_experts": row.number("experts"),
        "moe.router_topk": topk,
        "moe.ffn_hidden_size": ffn,
        "moe.layer_freq": settings.get("moe.layer_freq", frequency),
        "mtp.num_layers": 1 if _has_mtp(row, published) else None,
    }


def _num_dense_layers(layers: int, published: PublishedModel) -> int:
    """Layers without experts; a model that was cut keeps their share, at least one."""
    num_dense: int = published.get("dense", 0)
    num_published = published.get("layers", 0)
    if num_dense and layers != num_published:
        return min(layers, max(1, round(num_dense * layers / num_published)))
    return num_dense


def _has_mtp(row: Row, published: PublishedModel) -> bool:
    """Whether the model has multi-token prediction, as a published one that was not cut."""
    if not published.get("mtp") or row.required("layers") != published.get("layers", 0):
        return False
    return not re.search(r"w/o mtp|no mtp", row.text("note"))
