"""What the shapes of a checkpoint's tensors say about its model.

    guess_model    values of the model section by key

The number of heads is not among them, unless queries are normed, nor how experts are chosen: the
user has to say so.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from nanotrain.config.schema import KEYS
from nanotrain.errors import CheckpointError
from nanotrain.interop.hf.layout import COUNTED
from nanotrain.interop.hf.names import HFName, Naming
from nanotrain.interop.hf.tensor_mapping import EXPERT, Shape
from nanotrain.untrusted import plain_text

Values = dict[str, Any]


class Modules:
    """The shapes of tensors by our names of modules.

    Args:
        shapes: the shapes of all weights by name.
        namings: the names that they may have.
    """

    def __init__(self, shapes: Mapping[str, Shape], namings: Sequence[Naming]) -> None:
        self._shapes = shapes
        self._namings = namings

    def end(self, module: str) -> Shape | None:
        """The shape of the weight of a module outside of layers; None without it."""
        names = {f"{naming.ends[module]}.weight" for naming in self._namings}
        return self._first(names)

    def size(self, module: str, *, layer: int, leaf: str = "weight") -> Shape | None:
        """The shape of a tensor of a layer; None without it.

        Where experts have a tensor each, the shape of the first expert's tensor.
        """
        names = []
        for naming in self._namings:
            if module in naming.layers:
                name = full_name(naming.layers[module], leaf=leaf)
                names.append(f"{naming.layer.format(layer=layer)}.{name}".replace(EXPERT, "0"))
        return self._first(names)

    def num_layers(self) -> int:
        """The number of layers: one more than the highest number in the names."""
        patterns = {re.escape(naming.layer) for naming in self._namings}
        highest = -1
        for pattern in patterns:
            numbered = re.compile(pattern.replace(re.escape("{layer}"), r"(\d{1,9})") + r"\.")
            for name in self._shapes:
                found = numbered.match(name)
                highest = max(highest, int(found[1]) if found else -1)
        return highest + 1

    def num_experts(self, layer: int) -> int:
        """The number of experts of a layer, in one tensor or in a tensor each."""
        down = self.size("mlp.experts.down", layer=layer)
        if down is None or len(down) == 3:
            return down[0] if down else 0
        router = self.size("mlp.router", layer=layer)
        return router[0] if router else 0

    def _first(self, names: Sequence[str] | set[str]) -> Shape | None:
        return next((self._shapes[name] for name in names if name in self._shapes), None)


def full_name(name: HFName, *, leaf: str) -> str:
    """The name of a tensor of a module."""
    return name.name if name.is_full else f"{name.name}.{leaf}"


def guess_model(modules: Modules, given: Mapping[str, Any]) -> Values:
    """The values of the model section that shapes determine, by key.

    Args:
        modules: the tensors.
        given: the values that the user sets, by key.

    Raises:
        CheckpointError: no layers, shapes that are no model, or a value that the user has to set.
    """
    try:
        values = guess_ends(modules)
        num_layers = values["num_layers"]
        if "model.num_attention_heads" in given:
            num_heads: int | None = given["model.num_attention_heads"]
        else:
            num_heads = count_heads(modules)
        require_given(given, modules, num_layers=num_layers, num_heads=num_heads)
        assert num_heads is not None
        values["num_attention_heads"] = num_heads
        values |= guess_attention(modules, num_heads)
        values |= guess_mlp(modules, num_layers)
    except (TypeError, ValueError, LookupError, ArithmeticError) as error:
        raise CheckpointError(
            "the shapes of the tensors are those of no model that can be guessed",
            why=plain_text(f"{type(error).__name__}: {error}"),
            fix="name a folder with its config.json: --model-config FOLDER",
        ) from None
    return {f"model.{key}": value for key, value in values.items()}


def guess_ends(modules: Modules) -> Values:
    """Layers, width and vocabulary."""
    num_layers = modules.num_layers()
    if not 0 < num_layers <= COUNTED["num_layers"]:
        raise ValueError(f"it has {num_layers:,} layers")
    rows, hidden_size = sizes_of(modules.end("embedding.word"), dims=2)
    return {
        "num_layers": num_layers,
        "hidden_size": hidden_size,
        "vocab_size": rows,
        "make_vocab_size_divisible_by": 1,
    }


def count_heads(modules: Modules) -> int | None:
    """The number of heads where queries are normed per head; None elsewhere."""
    norm = modules.size("attention.query_norm", layer=0)
    query = modules.size("attention.query", layer=0)
    if norm is None or query is None or query[0] % norm[0]:
        return None
    return query[0] // norm[0]


def require_given(
    given: Mapping[str, Any], modules: Modules, *, num_layers: int, num_heads: int | None
) -> None:
    """Check that the user gives the settings that no shape shows.

    Raises:
        CheckpointError: with all flags that are missing.
    """
    needed = [] if num_heads else ["model.num_attention_heads"]
    if any(modules.num_experts(layer) for layer in range(num_layers)):
        needed += ["model.moe.router_topk", "model.moe.router_score_function"]
    missing = [KEYS[key].flag for key in needed if key not in given]
    if missing:
        raise CheckpointError(
            f"the model has to be named: {', '.join(missing)}",
            why="the shapes of tensors show neither heads nor how experts are chosen",
            fix=f"add {' and '.join(f'{flag} VALUE' for flag in missing)}, a recipe (+config=NAME) "
            "or --model-config FOLDER, with a config.json",
        )


def guess_attention(modules: Modules, num_heads: int) -> Values:
    """Sizes of attention, of the first layer."""
    if modules.size("attention.kv_down", layer=0) is not None:
        return guess_mla(modules, num_heads)
    query_rows, _ = sizes_of(modules.size("attention.query", layer=0), dims=2)
    key_rows, _ = sizes_of(modules.size("attention.key", layer=0), dims=2)
    head_dim = divided(query_rows, num_heads, what="rows of queries")
    return {
        "kv_channels": head_dim,
        "num_query_groups": divided(key_rows, head_dim, what="rows of keys"),
        "qk_layernorm": modules.size("attention.query_norm", layer=0) is not None,
        "add_qkv_bias": modules.size("attention.query", layer=0, leaf="bias") is not None,
    }


def guess_mla(modules: Modules, num_heads: int) -> Values:
    """Sizes of multi-head latent attention."""
    (kv_lora_rank,) = sizes_of(modules.size("attention.kv_latent_norm", layer=0), dims=1)
    down_rows, _ = sizes_of(modules.size("attention.kv_down", layer=0), dims=2)
    _, values = sizes_of(modules.size("attention.output", layer=0), dims=2)
    query_down = modules.size("attention.query_down", layer=0)
    query = modules.size("attention.query_up" if query_down else "attention.query", layer=0)
    query_rows, _ = sizes_of(query, dims=2)
    rotary = down_rows - kv_lora_rank
    return {
        "multi_latent_attention": True,
        "mla.q_lora_rank": query_down[0] if query_down else None,
        "mla.kv_lora_rank": kv_lora_rank,
        "mla.qk_pos_emb_head_dim": rotary,
        "mla.qk_head_dim": divided(query_rows, num_heads, what="rows of queries") - rotary,
        "mla.v_head_dim": divided(values, num_heads, what="columns of the output"),
    }


def guess_mlp(modules: Modules, num_layers: int) -> Values:
    """Sizes of MLPs and experts."""
    has_experts = []
    values: Values = {}
    for layer in range(num_layers):
        num_experts = modules.num_experts(layer)
        has_experts.append(int(num_experts > 0))
        if num_experts == 0:
            values["ffn_hidden_size"] = sizes_of(modules.size("mlp.down", layer=layer), dims=2)[1]
            continue
        values["moe.num_experts"] = num_experts
        down = modules.size("mlp.experts.down", layer=layer)
        assert down is not None
        values["moe.ffn_hidden_size"] = down[-1]
        shared = modules.size("mlp.shared.down", layer=layer)
        if shared is not None:
            values["moe.shared_expert_intermediate_size"] = shared[-1]
        bias = modules.size("mlp.router.expert_bias", layer=layer)
        values["moe.router_enable_expert_bias"] = bias is not None
    if any(has_experts):
        values["moe.layer_freq"] = str(has_experts).replace(" ", "")
    return values


def sizes_of(shape: Shape | None, *, dims: int) -> Shape:
    """The sizes of a tensor that must exist and have `dims` dims.

    Raises:
        ValueError: it is missing, or has another number of dims.
    """
    if shape is None or len(shape) != dims:
        raise ValueError(f"a tensor of {dims} dims is missing, or has the shape {shape}")
    return shape


def divided(size: int, number: int, *, what: str) -> int:
    """A size in equal parts.

    Raises:
        ValueError: it has none.
    """
    if number < 1 or size % number:
        raise ValueError(f"{size:,} {what} are no multiple of {number:,}")
    return size // number
