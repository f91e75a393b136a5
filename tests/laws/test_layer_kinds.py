"""Laws L1 to L7 for kinds of layers other than softmax attention with an MLP, and for chunks, in
every layout.

As in test_model_features.py one world of each layout trains every model in every way. Documents
begin inside of chunks and at their borders. The suite has the rows that see the planted bugs of
README.md and of tests/mutants; `make layouts` runs the others.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.harness import run_ranks
from tests.laws.compare import assert_alike
from tests.laws.more_layouts import with_mark
from tests.laws.test_mla import MLA
from tests.laws.test_model_features import (
    EXPERTS,
    GPIPE,
    OPTIM,
    SP,
    VPP,
    ZB,
    ZERO3,
    Layout,
    Trained,
    assert_equal_to_one_rank,
    name_of,
    stages,
    train_in_every_way,
)
from tests.laws.worlds import Case, train_cases

DOCUMENTS = {"reset_attention_mask": True}
# two layers each, or four that are half ones
MODELS: dict[str, dict[str, Any]] = {
    "short convolutions, output gate": EXPERTS
    | {
        "linear_attention_type": "short_conv",
        "linear_conv_kernel_dim": 3,
        "linear_attention_freq": "2",
        "moe_layer_freq": "2",
        "attention_output_gate": True,
        "hidden_dropout": 0.1,
    },
    "Mamba-2": EXPERTS
    | {
        "num_layers": 4,
        "hybrid_layer_pattern": "MM*E",
        "moe_latent_size": 16,
        "moe_num_zero_experts": 2,
        "mamba_state_dim": 6,
        "mamba_head_dim": 8,
        "mamba_num_heads": 8,
        "mamba_num_groups": 4,
        "hidden_dropout": 0.1,
    },
    "attention beside Mamba-2": EXPERTS
    | {
        "linear_attention_type": "attention_mamba2",
        "moe_layer_freq": "2",
        "mamba_state_dim": 6,
        "mamba_head_dim": 8,
        "mamba_num_heads": 8,
        "mamba_num_groups": 4,
        "mamba_rms_norm": False,
        "mamba_multipliers": [0.9, 1.2, 0.7, 1.1, 1.4],
        "mamba_output_multiplier": 0.6,
        "attention_output_multiplier": 1.5,
        "mlp_gate_multiplier": 1.3,
        "mlp_output_multiplier": 0.8,
        "hidden_dropout": 0.1,
    },
    "half layers, kda": EXPERTS
    | {
        "num_layers": 4,
        "hybrid_layer_pattern": "G-*E",
        "moe_latent_size": 16,
        "linear_attention_type": "kda",
        "linear_num_key_heads": 8,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "add_bias_linear": True,
        "norm_placement": "sandwich",
        "residual_multiplier": 0.7,
    },
    # layers 2 and 3 read keys of layers 0 and 1, over several stages in pipelines
    "shared keys": EXPERTS
    | {
        "num_layers": 4,
        "num_kv_shared_layers": 2,
        "window_size": 5,
        "window_attn_skip_freq": "2",
        "num_query_groups": 1,  # replicated over tp
        "window_query_groups": 4,
        "kv_channels": 16,
        "window_kv_channels": 12,
        "attention_k_eq_v": True,
        "value_l2_norm": True,
        "rotary_proportional": True,
        "rotary_percent": 0.5,
        "layer_scale": True,
        "layer_input_size": 6,
        "norm_placement": "sandwich",
        "moe_separate_norms": True,
        "moe_shared_expert_intermediate_size": 32,
        "use_double_wide_mlp": True,
        "qk_layernorm": True,
        "attention_output_gate": True,
        "moe_layer_freq": "2",
        "hidden_dropout": 0.1,
        "attention_dropout": 0.1,
    },
    # layers 2 and 3 attend to the keys that layer 1 selected, over several stages in pipelines
    "sparse attention": EXPERTS
    | MLA
    | {
        "num_layers": 4,
        "sparse_attention_type": "dsa",
        "dsa_indexer_share_freq": "[0,0,1,1]",
        "dsa_indexer_n_heads": 3,
        "dsa_indexer_head_dim": 8,
        "dsa_indexer_topk": 4,
        "dsa_indexer_loss_coeff": 1.0,
        # smaller weights attend to all keys alike, and leave nothing to learn
        "init_method_std": 0.2,
        "moe_layer_freq": "2",
        "mtp_num_layers": 1,
        "attention_dropout": 0.2,
    },
    # the first of two layers selects blocks, the other one attends to all keys
    "selected blocks": EXPERTS
    | {
        "sparse_attention_type": "blocks",
        "num_query_groups": 4,
        "qk_layernorm": True,
        "dsa_indexer_n_heads": 4,
        "dsa_indexer_head_dim": 16,
        "dsa_indexer_topk": 4,
        "dsa_indexer_block_size": 2,
        "dsa_indexer_layer_freq": "2",
        "dsa_indexer_loss_coeff": 1.0,
        # smaller weights attend to all keys alike, and leave nothing to learn
        "init_method_std": 0.2,
        "moe_layer_freq": "2",
        "attention_dropout": 0.2,
    },
    # of tokens of one document; over pipelines every stage knows the tokens that choose experts
    "compressed keys": EXPERTS
    | {
        "num_layers": 4,
        "sparse_attention_type": "compressed",
        "compressed_layer_pattern": "CHWC",
        "compressed_sparse_ratio": 2,
        "compressed_heavy_ratio": 4,
        "compressed_q_lora_rank": 12,
        "compressed_output_groups": 4,
        "compressed_output_lora_rank": 6,
        "window_size": 3,
        "num_query_groups": 1,
        "kv_channels": 12,
        "rotary_percent": 0.5,
        "rotary_base_local": 500.0,
        "softmax_type": "learnable",
        "dsa_indexer_n_heads": 3,
        "dsa_indexer_head_dim": 8,
        "dsa_indexer_topk": 2,
        "dsa_indexer_loss_coeff": 1.0,
        # smaller weights attend to all keys alike, and leave nothing to learn
        "init_method_std": 0.2,
        "residual_type": "mhc",
        "residual_streams": 2,
        "moe_hash_layers": "[0,1,0,0]",
        "moe_router_score_function": "sqrtsoftplus",
        "moe_router_enable_expert_bias": True,
        "attention_dropout": 0.2,
    },
    "chunks, factors of queries, norms of heads, weighted inputs of experts": EXPERTS
    | {
        "no_rope_freq": "2",
        "window_attn_skip_freq": "2",
        "attention_chunk_size": 5,
        "attn_scale": 0.6,
        "floor_scale": 3,
        "qk_l2_norm": True,
        "moe_layer_freq": "2",
        "moe_router_topk": 1,
        "moe_router_score_function": "sigmoid",
        "moe_apply_probs_on_input": True,
        "moe_shared_expert_intermediate_size": 24,
        "moe_shared_expert_average": True,
        "moe_output_norm": True,
        "hidden_dropout": 0.1,
    },
    "shortcuts": EXPERTS
    | MLA
    | {
        "mla_scale_lora": True,
        "moe_layer_freq": "2",
        "moe_shortcut": True,
        "moe_shared_expert_intermediate_size": 32,
        "ffn_hidden_size": None,
        "moe_num_zero_experts": 2,
        "moe_router_topk": 3,
        "moe_router_pre_softmax": True,
        "moe_router_enable_expert_bias": True,
        "moe_aux_loss_coeff": [0.01],
        "residual_multiplier": 0.8,
        "mtp_num_layers": 1,
    },
    "half layers, gated delta net": EXPERTS
    | {
        "num_layers": 4,
        "hybrid_layer_pattern": "GE*G",
        "linear_attention_type": "gated_delta_net",
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 6,
        "linear_allow_neg_eigval": True,
        "linear_norm_epsilon": 1e-2,
        "linear_norm_placement": "pre",
        "norm_placement": "post",
        "attention_output_gate": True,
        "attention_output_gate_per_head": True,
        "hidden_dropout": 0.1,
    },
}
# for pipelines: four layers each
DEEP = {
    name if "num_layers" in fields else f"{name}, four layers": {"num_layers": 4} | fields
    for name, fields in MODELS.items()
}
ALL = MODELS | DEEP
BATCH = {"global_batch": 4}


class KindLayout(Layout):
    """A layout that trains models of `ALL` on samples with documents."""

    def case(self, model: str) -> Case:
        case = super().case(model).but(model=ALL[model], data=DOCUMENTS)
        return (
            case.but(parallel=GATHER)
            if "sparse_attention_type" in ALL[model] and self.sizes.get("cp", 1) > 1
            else case
        )


def row(
    num_ranks: int,
    sizes: dict[str, Any],
    options: dict[str, Any],
    *args: Any,
    kinds: slice = slice(None),
) -> KindLayout:
    models = tuple(DEEP if "pp" in sizes else MODELS)
    return KindLayout(num_ranks, sizes, options, *args, models=models[kinds], **BATCH)


GATHER = {"cp_comm_type": "allgather"}
A2A = {"cp_comm_type": "a2a"}
# the halves of the kinds: in the suite each is in one of two pipelines, in `make layouts` in both
EVEN = slice(0, None, 2)
ODD = slice(1, None, 2)
LAYOUTS = [
    row(2, {"strategy": "optim_grads", "tp": 2}, {}, "outputs", 1),
    row(2, {"strategy": "optim", "tp": 2}, SP, "modules"),
    row(2, {"strategy": "optim", "cp": 2}, {}, "full", 1),
    row(2, {"strategy": "no_shard", "pp": 2}, ZB | stages("Et|tttL"), kinds=ODD),
    row(4, ZERO3 | {"tp": 2, "pp": 2, "etp": 1, "ep": 2}, SP | GPIPE, "modules", kinds=EVEN),
]
MORE_LAYOUTS = [
    row(2, {"strategy": "no_shard", "pp": 2}, ZB | stages("Ettt|tL"), kinds=EVEN),
    row(4, ZERO3 | {"tp": 2, "pp": 2, "etp": 1, "ep": 2}, SP, "modules", kinds=ODD),
    row(2, {"strategy": "no_shard", "cp": 2}, A2A, "groups", 1),
    row(2, {"strategy": "optim", "pp": 2}, VPP, "modules"),
    row(2, {"strategy": "optim_grads_params", "ep": 2}, {}, "full", 1),
    row(4, {"strategy": "optim", "tp": 2, "cp": 2, "etp": 1, "ep": 2}, SP, "full", 1),
]
# More ranks of what others above have: only trained.
WIDER = [row(4, {"strategy": "optim", "cp": 4}, A2A, "", 1)]
MORE_WIDER = [
    row(4, {"strategy": "optim_grads", "cp": 4}, {}, "", 1),
    row(4, {"strategy": "optim", "instances": 2}, {"outer_dp_sharding_strategy": "optim"}, "", 1),
]


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Trained]]:
    """Checkpoints of one rank and what it computes."""
    folder = tmp_path_factory.mktemp("one-rank")
    single = replace(row(1, {}, {}, "full", 1), models=tuple(ALL))
    return folder, run_ranks(1, train_in_every_way, single, folder, None, shares=True)[0]


@pytest.mark.parametrize("layout", [*LAYOUTS, *with_mark(MORE_LAYOUTS)], ids=name_of)
def test_a_layout_keeps_the_laws_with_every_kind(
    layout: KindLayout, one_rank: tuple[Path, dict[str, Trained]], tmp_path: Path
) -> None:
    folder, single = one_rank
    by_rank = run_ranks(
        layout.num_ranks, train_in_every_way, layout, tmp_path, folder, **layout.sizes, shares=True
    )
    assert_equal_to_one_rank(by_rank, single, layout)


@pytest.mark.parametrize("layout", [*WIDER, *with_mark(MORE_WIDER)], ids=name_of)
def test_more_ranks_train_every_kind_as_one_rank_does(
    layout: KindLayout, one_rank: tuple[Path, dict[str, Trained]]
) -> None:
    cases = [layout.case(model) for model in MODELS]
    by_rank = run_ranks(layout.num_ranks, train_cases, cases, **layout.sizes, shares=True)
    for model, *outcomes in zip(MODELS, *by_rank, strict=True):
        single = one_rank[1][model].outcome
        assert_alike(outcomes, [single], row=f"{model} {name_of(layout)}", lr=OPTIM["lr"], **BATCH)
