"""Names of tensors become templates, and templates modules."""

import pytest

from nanotrain.interop.hf.derive.tensors import (
    ModuleName,
    Vocabulary,
    context_of_module,
    context_of_stem,
    read_table,
)
from nanotrain.interop.hf.families import FAMILIES

SHAPES = {
    "model.embed.weight": (9, 4),
    "model.layers.0.attn.q.weight": (4, 4),
    "model.layers.0.attn.q.bias": (4,),
    "model.layers.1.mlp.experts.0.up.weight": (6, 4),
    "model.layers.1.mlp.experts.1.up.weight": (6, 4),
    "model.layers.1.mlp.gate.score_bias": (2,),
    "model.layers.2.eh_proj.weight": (4, 8),
}


def test_numbers_of_layers_and_experts_become_templates() -> None:
    table = read_table(SHAPES, num_layers=2)
    assert table is not None
    assert table.layer == "model.layers.{layer}" and table.prefix == "model."
    assert table.ends == {"model.embed.weight": (9, 4)}
    assert table.stems == {
        "attn.q": (4, 4),
        "mlp.experts.{expert}.up": (6, 4),
        "mlp.gate.score_bias": (2,),
    }
    assert table.has_bias("attn.q") and not table.has_bias("mlp.experts.{expert}.up")
    assert table.num_later_layers == 1
    assert read_table({"head.weight": (9, 4)}, num_layers=2) is None


@pytest.mark.parametrize(
    ("stem", "context"),
    [
        ("self_attn.q_proj", "attention"),
        ("attn.attention.q_proj", "attention"),
        ("input_layernorm", "norm"),
        ("mlp.shared_experts.up_proj", "mlp.shared"),
        ("mlp.experts.{expert}.up_proj", "mlp.experts"),
        ("mlp.act_fn.alpha_p", "mlp.activation"),
        ("feed_forward.w1", "mlp"),
        ("mamba.A_log", "other"),
    ],
)
def test_the_parts_of_a_name_say_to_which_part_of_a_layer_it_belongs(
    stem: str, context: str
) -> None:
    assert context_of_stem(stem) == context


def test_contexts_of_modules_are_those_of_names() -> None:
    modules = ("attention.query", "mlp.up", "mlp.shared.up", "mlp.experts.up", "mlp_norm")
    contexts = ("attention", "mlp", "mlp.shared", "mlp.experts", "norm")
    assert tuple(map(context_of_module, modules)) == contexts


def test_known_families_are_the_dictionary() -> None:
    vocabulary = Vocabulary.of([FAMILIES["llama"], FAMILIES["phi3"]])
    (query,) = vocabulary.find("attention", "q_proj")
    assert query.modules == ("attention.query",)
    (fused,) = vocabulary.find("attention", "qkv_proj")
    assert fused.modules == ("attention.query", "attention.key", "attention.value")
    # an expert has the names of an MLP where no family names its own
    (expert,) = vocabulary.find("mlp.experts", "up_proj")
    assert expert.modules == ("mlp.experts.up",)
    assert vocabulary.find("attention", "foo") == []


def test_a_plain_name_is_text_and_others_are_tables() -> None:
    assert ModuleName("mlp.up_proj", ("mlp.up",)).row() == "mlp.up_proj"
    name = ModuleName("w", ("mlp.gate", "mlp.up"), transposed=True)
    assert name.row() == {"name": "w", "fused": ["mlp.gate", "mlp.up"], "transposed": True}
    assert name.row(pairs=True)["has_neighbour_pairs"]  # type: ignore[index]
