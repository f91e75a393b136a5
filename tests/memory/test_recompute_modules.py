"""Functions of a block are replaced in place, under their names."""

from collections.abc import Callable
from dataclasses import replace

from nanotrain.config.model import MoEConfig
from nanotrain.memory.recompute import Recompute
from nanotrain.memory.recompute_modules import recompute_modules
from tests.model.building import LLAMA, build


def test_modules_of_a_block_are_recomputed_under_their_names_and_absent_ones_left_out():
    config = replace(LLAMA, norm_placement="post")
    stage, recompute = build(config), Recompute()
    block, names = stage.layers["0"], [name for name, _ in stage.named_parameters()]
    recompute_modules(
        block,
        ["core_attn", "mlp", "moe", "layernorm", "mla_up_proj", "moe_act"],
        recompute=recompute,
    )
    assert "forward" in vars(block.mlp) and "forward" not in vars(block.mlp_norm), (
        "a norm before it is not declared"
    )
    assert [name for name, _ in stage.named_parameters()] == names and list(
        stage.state_dict()
    ) == names


def is_traced(function: Callable[..., object]) -> bool:
    """Whether a compiled graph contains a function."""
    return bool(getattr(function, "is_traced", True))


def test_norms_are_recomputed_in_graphs_where_what_reads_them_is_in_graphs() -> None:
    experts = MoEConfig(num_experts=4, router_topk=2, ffn_hidden_size=48)
    stage = build(replace(LLAMA, qk_layernorm=True, moe=experts))
    block = stage.layers["0"]
    recompute_modules(block, ["pointwise"], recompute=Recompute())
    assert is_traced(block.attention_norm.forward)
    assert is_traced(block.attention.prepare_query_key)
    assert not is_traced(block.mlp_norm.forward), "experts run between graphs"


def test_queries_are_recomputed_between_graphs_where_attention_is() -> None:
    block = build(replace(LLAMA, qk_layernorm=True)).layers["0"]
    recompute_modules(block, ["pointwise"], recompute=Recompute(), traces_attention=False)
    assert not is_traced(block.attention.prepare_query_key)
    assert is_traced(block.mlp.activation) and is_traced(block.attention_norm.forward)


def test_norms_of_a_recomputed_mlp_are_recomputed_between_graphs() -> None:
    block = build(LLAMA).layers["0"]
    recompute_modules(block, ["mlp", "pointwise"], recompute=Recompute())
    assert is_traced(block.attention_norm.forward) and not is_traced(block.mlp_norm.forward)
