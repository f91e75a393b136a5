"""Where each parameter lies in a Hugging Face folder: one pure function per naming scheme.

`llama_places` serves Llama, Qwen2 and Qwen3, which differ only in which parameters exist; `gpt2_places` serves GPT-2,
whose matrices are transposed and whose query, key and value are one tensor. Import and export both read these
tables and nothing else, so what one writes the other finds.

    H hidden   Q query heads x width   K key/value heads x width   F width of the MLP   V vocabulary
"""

from dataclasses import dataclass

from nanotrain.config.config import Activation, ModelConfig
from nanotrain.config.derive import ffn_size, head_dim, query_groups
from nanotrain.topology.boxes import Box


@dataclass(frozen=True)
class Place:
    """A parameter's place in a Hugging Face tensor.

    Args:
        tensor: the tensor's name.
        shape: the parameter's shape, padding of the vocabulary cut off.
        transposed: the tensor is [inputs, outputs] where the parameter is [outputs, inputs].
        offset: outputs of the tensor that belong to the parameters before this one.
        outputs: outputs of the whole tensor; unset where the parameter is all of it.
    """

    tensor: str
    shape: tuple[int, ...]
    transposed: bool = False
    offset: int = 0
    outputs: int | None = None

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor in the file."""
        shape = (self.outputs or self.shape[0], *self.shape[1:])
        return shape[::-1] if self.transposed else shape

    def box(self, piece: Box) -> Box:
        """A piece of the parameter, in the tensor's coordinates.

        >>> Place("c_attn.weight", (4, 4), transposed=True, offset=4, outputs=12).box(Box((1, 0), (3, 4)))
        Box(start=(0, 5), stop=(4, 7))
        """
        moved = piece.shifted((self.offset,) + (0,) * (len(self.shape) - 1))
        return Box(moved.start[::-1], moved.stop[::-1]) if self.transposed else moved


def llama_places(model: ModelConfig) -> dict[str, Place]:
    """Places of a Llama, Qwen2 or Qwen3."""
    hidden, ffn, vocab = model.hidden_size, ffn_size(model), _vocab_size(model)
    query, key = model.num_attention_heads * head_dim(model), query_groups(model) * head_dim(model)
    projections = {
        "attention.query": ("self_attn.q_proj", query, hidden),
        "attention.key": ("self_attn.k_proj", key, hidden),
        "attention.value": ("self_attn.v_proj", key, hidden),
        "attention.output": ("self_attn.o_proj", hidden, query),
        "mlp.gate": ("mlp.gate_proj", ffn, hidden),
        "mlp.up": ("mlp.up_proj", ffn, hidden),
        "mlp.down": ("mlp.down_proj", hidden, ffn),
    }
    if model.activation is not Activation.swiglu:
        del projections["mlp.gate"]
    norms = {"attention_norm": ("input_layernorm", hidden), "mlp_norm": ("post_attention_layernorm", hidden)}
    if model.qk_layernorm:
        norms["attention.query_norm"] = ("self_attn.q_norm", head_dim(model))
        norms["attention.key_norm"] = ("self_attn.k_norm", head_dim(model))

    places = {"embedding.word.weight": Place("model.embed_tokens.weight", (vocab, hidden))}
    for layer in range(model.num_layers):
        ours, theirs = f"layers.{layer}", f"model.layers.{layer}"
        for name, (tensor, size) in norms.items():
            places[f"{ours}.{name}.weight"] = Place(f"{theirs}.{tensor}.weight", (size,))
        for name, (tensor, outputs, inputs) in projections.items():
            places[f"{ours}.{name}.weight"] = Place(f"{theirs}.{tensor}.weight", (outputs, inputs))
            if model.add_bias_linear or (model.add_qkv_bias and name in QKV):
                places[f"{ours}.{name}.bias"] = Place(f"{theirs}.{tensor}.bias", (outputs,))
    places["final_norm.weight"] = Place("model.norm.weight", (hidden,))
    return places | _head(model)


def gpt2_places(model: ModelConfig) -> dict[str, Place]:
    """Places of a GPT-2."""
    hidden, ffn, vocab = model.hidden_size, ffn_size(model), _vocab_size(model)
    projections = {
        "attention.query": Place("attn.c_attn", (hidden, hidden), offset=0, outputs=3 * hidden),
        "attention.key": Place("attn.c_attn", (hidden, hidden), offset=hidden, outputs=3 * hidden),
        "attention.value": Place("attn.c_attn", (hidden, hidden), offset=2 * hidden, outputs=3 * hidden),
        "attention.output": Place("attn.c_proj", (hidden, hidden)),
        "mlp.up": Place("mlp.c_fc", (ffn, hidden)),
        "mlp.down": Place("mlp.c_proj", (hidden, ffn)),
    }
    places = {
        "embedding.word.weight": Place("transformer.wte.weight", (vocab, hidden)),
        "embedding.position.weight": Place("transformer.wpe.weight", (model.max_position_embeddings, hidden)),
    }
    for layer in range(model.num_layers):
        ours, theirs = f"layers.{layer}", f"transformer.h.{layer}"
        places |= _layer_norm(f"{ours}.attention_norm", f"{theirs}.ln_1", size=hidden)
        places |= _layer_norm(f"{ours}.mlp_norm", f"{theirs}.ln_2", size=hidden)
        for name, place in projections.items():
            tensor, offset, outputs = f"{theirs}.{place.tensor}", place.offset, place.outputs
            places[f"{ours}.{name}.weight"] = Place(f"{tensor}.weight", place.shape, True, offset, outputs)
            places[f"{ours}.{name}.bias"] = Place(f"{tensor}.bias", place.shape[:1], False, offset, outputs)
    return places | _layer_norm("final_norm", "transformer.ln_f", size=hidden) | _head(model)


QKV = ("attention.query", "attention.key", "attention.value")


def _layer_norm(name: str, tensor: str, *, size: int) -> dict[str, Place]:
    return {f"{name}.{part}": Place(f"{tensor}.{part}", (size,)) for part in ("weight", "bias")}


def _head(model: ModelConfig) -> dict[str, Place]:
    if not model.untie_embeddings_and_output_weights:
        return {}
    return {"head.weight": Place("lm_head.weight", (_vocab_size(model), model.hidden_size))}


def _vocab_size(model: ModelConfig) -> int:
    assert model.vocab_size is not None, "a Hugging Face config always names its vocabulary size"
    return model.vocab_size
