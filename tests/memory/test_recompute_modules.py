"""Functions of a block are replaced in place, under their names."""

from dataclasses import replace

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
