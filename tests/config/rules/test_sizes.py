"""Rules between the model and its layout. The default model: 4 layers, 4 heads, 256 wide, 704
inside the MLP.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanotrain.config.load import load_config
from nanotrain.config.rules.check import check_layout
from nanotrain.config.rules.sizes import Values
from nanotrain.errors import ConfigError
from nanotrain.spec.stages import split_layers
from tests.config.asking import config_of, validate

TP2 = {"tensor_model_parallel_size": 2}
SPARSE = {"multi_latent_attention": True, "q_lora_rank": 24, "sparse_attention_type": "dsa"}
DELTA = {"linear_attention_type": "gated_delta_net", "linear_num_key_heads": 1}
CP2 = {"context_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
TURNS = {
    "overlap_moe_expert_parallel_comm": True,
    "expert_model_parallel_size": 2,
    "num_experts": 8,
}
V = {"pipeline_schedule": "zb-v", "num_virtual_stages_per_pipeline_rank": 2}
EP2 = {"expert_model_parallel_size": 2}
EXPERTS = {"num_experts": 8}
FIRST, LAST = "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"


EMBEDDING, LOSS = "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"
LAYOUT = "pipeline_model_parallel_layout"


@pytest.mark.parametrize(
    "keys",
    [
        {},
        TP2 | CP2 | PP2 | EP2 | EXPERTS | {"sequence_parallel": True},
        {"tensor_model_parallel_size": 4, "num_query_groups": 2},
        TP2 | {"num_query_groups": 4},
        TP2 | {"multi_latent_attention": True},
        CP2 | {"cp_comm_type": "a2a", "tensor_model_parallel_size": 2},
        SPARSE | CP2 | {"cp_comm_type": "allgather"},
        PP2 | {"pipeline_schedule": "interleaved", "num_virtual_stages_per_pipeline_rank": 2},
        TP2 | {"make_vocab_size_divisible_by": 3},  # of a vocabulary that is not known yet
        PP2 | {"num_layers": 5},
        PP2 | {"num_layers": 5, LOSS: True},
        PP2 | {"num_layers": 2, LOSS: True, EMBEDDING: True},
        PP2 | {"num_layers": 5, FIRST: 2},
        PP2 | {"pipeline_model_parallel_layout": "Ett|ttmL", "mtp_num_layers": 1},
        PP2 | {"num_layers": 5, "pipeline_model_parallel_layout": "Et*5|L"},
        {
            "num_layers": 1,
            "pipeline_model_parallel_layout": "E|t|L",
            "pipeline_model_parallel_size": 3,
        },
        PP2 | {"num_layers": 5, FIRST: 2, LAST: 3},
        {"pipeline_model_parallel_size": 4, "num_layers": 10, FIRST: 3, LAST: 2},
        EXPERTS | {"moe_ffn_hidden_size": 99, "expert_tensor_parallel_size": 1} | TP2,
    ],
)
def test_what_divides_breaks_no_rule(keys):
    check_layout(config_of(**keys))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"pipeline_model_parallel_size": 3, LAYOUT: "Et*4|m|L", "mtp_num_layers": 1},
            "leaves pipeline rank 1 without layers",
        ),
        (PP2 | V | TURNS, "has no full backward of another microbatch"),
        (
            TURNS | {"data_parallel_sharding_strategy": "optim_grads_params"},
            "gather and free the parameters of each other",
        ),
        (PP2 | V | {FIRST: 2}, "--decoder-last-pipeline-num-layers with --pipeline-schedule zb-v"),
        (
            PP2 | {"num_layers": 5, LOSS: True, EMBEDDING: True},
            "7 layers cannot be split evenly over pp=2",
        ),
        (PP2 | {"num_layers": 5, LOSS: True, FIRST: 2}, "beside lengths of stages"),
        (PP2 | {LAYOUT: "Ett|tttL"}, "pipeline_model_parallel_layout has 5 of 4 layers"),
        (
            PP2 | {LAYOUT: "Ett|ttm*2L", "mtp_num_layers": 1},
            "has 2 layers of multi-token prediction: mtp_num",
        ),
        (PP2 | {LAYOUT: "Ett|ttmL"}, "mtp_num_layers is unset"),
        (PP2 | {LAYOUT: "Ett|tt|L"}, "pipeline_model_parallel_layout has 3 stages for pp=2"),
        (PP2 | {LAYOUT: "Ett|tt"}, "the embedding E is first, the loss L is last"),
        ({"tensor_model_parallel_size": 8}, "num_attention_heads 4 cannot be shared by tp=8 ranks"),
        (
            TP2 | {"ffn_hidden_size": 99},
            "ffn_hidden_size 99 cannot be shared by tp=2 ranks: tensor_model_parallel_size",
        ),
        (TP2 | {"ffn_hidden_size": 99}, "set --ffn-hidden-size 100"),
        (
            {"tensor_model_parallel_size": 2, "num_attention_heads": 6, "num_query_groups": 3},
            "3 key/value heads (num_query_groups) cannot be shared by tp=2 ranks",
        ),
        (
            TP2 | EXPERTS | {"moe_shared_expert_intermediate_size": 33},
            "set --moe-shared-expert-intermediate-size 34",
        ),
        (
            TP2 | {"make_vocab_size_divisible_by": 3, "vocab_size": 7},
            "they would share 9 rows; set --make-vocab-size-divisible-by 6",
        ),
        (TP2 | {"make_vocab_size_divisible_by": 1, "vocab_size": 131}, "they would share 131 rows"),
        (
            CP2 | {"seq_length": 250},
            "seq_length 250 cannot be split into 4 parts: cp=2 ranks have two chunks each",
        ),
        (CP2 | {"seq_length": 250}, "set --seq-length 252"),
        (
            TP2 | {"seq_length": 255, "sequence_parallel": True},
            "sequence_parallel splits the sequence over tp=2 ranks",
        ),
        (
            TP2 | EXPERTS | {"seq_length": 255},
            "a layer with experts splits the sequence over tp=2 ranks",
        ),
        (
            {"tensor_model_parallel_size": 4, "sequence_parallel": True, "seq_length": 252} | CP2,
            "seq_length 252 cannot be split into 8 parts: cp=2 ranks have two chunks each and sequence_parallel splits "
            "the two together over tp=4 ranks",
        ),
        (
            CP2 | {"cp_comm_type": "a2a", "tensor_model_parallel_size": 4},
            "a2a needs tp*cp = 8 to divide",
        ),
        (
            DELTA | {"tensor_model_parallel_size": 4, "linear_num_key_heads": 2},
            "linear_num_key_heads 2 cannot be shared",
        ),
        (SPARSE | CP2, "dsa with cp_comm_type p2p over cp=2 ranks"),
        (
            DELTA | CP2 | {"cp_comm_type": "a2a", "linear_num_value_heads": 3},
            "3 value heads (linear_num_value_heads)",
        ),
        (PP2 | {"num_layers": 1}, "1 layer cannot fill pp=2 pipeline stages"),
        (
            PP2 | {"pipeline_schedule": "interleaved", "num_virtual_stages_per_pipeline_rank": 4},
            "4 layers cannot fill pp=2 x 4 = 8 pipeline stages",
        ),
        (
            PP2
            | {
                "pipeline_schedule": "interleaved",
                "num_virtual_stages_per_pipeline_rank": 2,
                FIRST: 1,
            },
            "with 2 virtual stages per pipeline rank",
        ),
        (
            {"pipeline_model_parallel_size": 4, "num_layers": 6, FIRST: 3, LAST: 2},
            "1 layer is left for 2 of pp=4 pipeline stages: of 6 layers the first and last rank have 3 + 2",
        ),
        (
            {"pipeline_model_parallel_size": 4, "num_layers": 6, FIRST: 3, LAST: 2},
            "so that they leave at least 2",
        ),
        (PP2 | {FIRST: 4}, "0 layers are left for 1 of pp=2"),
        (PP2 | {FIRST: 1, LAST: 1}, "2 layers are left for 0 of pp=2"),
        (EP2, "expert_model_parallel_size 2 has no effect: the model has no experts"),
        (
            {"expert_tensor_parallel_size": 2},
            "expert_tensor_parallel_size 2 has no effect: the model has no experts",
        ),
        (EXPERTS | {"expert_model_parallel_size": 3}, "8 experts cannot be shared by ep=3 ranks"),
        (EXPERTS | {"expert_model_parallel_size": 3}, "set --num-experts 9"),
        (
            EXPERTS | TP2 | {"moe_ffn_hidden_size": 99},
            "an expert of width 99 cannot be shared by etp=2 ranks: expert_tensor_parallel_size (unset: as tensor",
        ),
    ],
)
def test_what_does_not_divide_is_named_with_its_numbers(keys, message):
    with pytest.raises(ConfigError) as caught:
        check_layout(config_of(**keys))
    assert message in str(caught.value)
    assert caught.value.fix


def test_settings_of_stages_break_no_rule_on_one_stage():
    """That they have no effect is an error, and the only one."""
    check_layout(
        config_of(
            num_layers=3,
            num_virtual_stages_per_pipeline_rank=2,
            **{FIRST: 9, LAST: 4, EMBEDDING: True},
        )
    )


@given(
    tp=st.sampled_from([1, 2, 4]),
    cp=st.integers(1, 4),
    length=st.integers(1, 600),
    sequence_parallel=st.booleans(),
)
def test_the_sequence_length_that_an_error_names_is_the_next_that_fits(
    tp, cp, length, sequence_parallel
):
    sizes = {
        "tensor_model_parallel_size": tp,
        "context_parallel_size": cp,
        "sequence_parallel": sequence_parallel,
    }
    try:
        check_layout(config_of(seq_length=length, **sizes))
        assert length % cp == 0 and (cp == 1 or length % (2 * cp) == 0)
        assert not sequence_parallel or length // cp % tp == 0
    except ConfigError as error:
        cure = int(error.fix.split()[-1])
        check_layout(config_of(seq_length=cure, **sizes))
        for shorter in range(length, cure):
            with pytest.raises(ConfigError):
                check_layout(config_of(seq_length=shorter, **sizes))


@given(
    num_layers=st.integers(1, 9),
    pp=st.integers(2, 5),
    first=st.none() | st.integers(1, 5),
    last=st.none() | st.integers(1, 5),
    virtual=st.integers(1, 3),
)
def test_the_rule_of_stages_refuses_exactly_what_cannot_be_split(
    num_layers, pp, first, last, virtual
):
    config = config_of(
        num_layers=num_layers,
        pipeline_model_parallel_size=pp,
        num_virtual_stages_per_pipeline_rank=virtual,
        **{FIRST: first, LAST: last},
    )
    try:
        split_layers(num_layers, pp * virtual, first=first, last=last, stages_per_rank=virtual)
    except AssertionError:
        with pytest.raises(ConfigError):
            check_layout(config)
    else:
        check_layout(config)


FULL, SELECTIVE = {"recompute_granularity": "full"}, {"recompute_granularity": "selective"}
EXPERTS, MLA = {"num_experts": 4}, {"multi_latent_attention": True}
OFFLOAD = {"cpu_offloading": True, "cpu_offloading_num_layers": 2}


def modules(*names: str) -> dict[str, object]:
    return SELECTIVE | {"recompute_modules": list(names)}


@pytest.mark.parametrize(
    "keys",
    [
        FULL,
        FULL | {"recompute_method": "block"},
        FULL | {"recompute_method": "uniform", "recompute_num_layers": 4},
        PP2 | FULL | {"num_layers": 5, "recompute_method": "block", "recompute_num_layers": 3},
        SELECTIVE,
        modules("core_attn", "layernorm", "mlp"),
        modules("moe") | EXPERTS,
        modules("moe_act", "mlp") | EXPERTS | {"moe_layer_freq": "[0]+[1]*3"},
        modules("mla_up_proj") | MLA,
        modules("core_attn", "mlp") | {"torch_compile": True},
        OFFLOAD,
    ],
)
def test_what_fits_breaks_no_rule(keys):
    validate(config_of(**keys), to_train=True)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"recompute_method": "block"},
            "recompute_method = block has no effect: it belongs to",
        ),
        (SELECTIVE | {"recompute_num_layers": 2}, "recompute_num_layers = 2 has no effect"),
        ({"recompute_modules": ["mlp"]}, "it belongs to recompute_granularity selective"),
        (FULL | {"recompute_modules": ["mlp"]}, "it belongs to recompute_granularity selective"),
        (FULL | {"recompute_num_layers": 2}, "recompute_method is unset"),
        (
            FULL | {"recompute_num_layers": 2},
            "set --recompute-method uniform or --recompute-method block",
        ),
        (
            FULL | {"recompute_method": "block", "recompute_num_layers": 5},
            "set --recompute-num-layers to at most 4",
        ),
        (
            PP2 | FULL | {"recompute_method": "uniform", "recompute_num_layers": 3},
            "the longest of 2 pipeline stages has 2 of 4 layers",
        ),
        (modules("core_atn"), "did you mean --recompute-modules core_attn?"),
        (modules("core_attn", "moe"), "moe has no effect: the model has no experts"),
        (modules("mla_up_proj"), "mla_up_proj has no effect: multi_latent_attention is off"),
        (modules("mlp") | EXPERTS, "mlp has no effect: every layer has experts"),
        (
            modules("moe", "core_attn") | EXPERTS | {"moe_shortcut": True},
            "recompute_modules moe core_attn with moe_shortcut",
        ),
        (modules("moe", "moe_act") | EXPERTS, "moe_act has no effect"),
        ({"cpu_offloading_num_layers": 2}, "cpu_offloading_num_layers = 2 has no effect"),
        (
            OFFLOAD | {"cpu_offloading_num_layers": 0},
            "set --cpu-offloading-num-layers to at most 3",
        ),
        (
            OFFLOAD | {"cpu_offloading_num_layers": 4},
            "the longest of 1 pipeline stage has 4 of 4 layers",
        ),
        (
            OFFLOAD | PP2 | {"cpu_offloading_num_layers": 2},
            "set --cpu-offloading-num-layers to at most 1",
        ),
        (OFFLOAD | SELECTIVE, "cpu_offloading with recompute_granularity selective"),
        (OFFLOAD | {"torch_compile": True}, "cpu_offloading with torch_compile"),
        (OFFLOAD | {"device": "cpu"}, "activations on a CPU are in host memory already"),
        (
            modules("layernorm") | {"torch_compile": True},
            "torch_compile with recompute_modules layernorm",
        ),
    ],
)
def test_a_contradiction_is_one_error(keys, message):
    with pytest.raises(ConfigError) as caught:
        validate(config_of(**keys), to_train=True)
    assert message in str(caught.value)


@given(num_layers=st.integers(2, 40), pp=st.integers(1, 8), first=st.none() | st.integers(1, 5))
def test_the_longest_stage_is_that_of_the_split(num_layers, pp, first):
    if num_layers < 2 * pp + 5 or (pp == 1 and first):
        return
    fields = {
        "num_layers": num_layers,
        "pipeline_model_parallel_size": pp,
        "decoder_first_pipeline_num_layers": first,
    }
    stages = split_layers(num_layers, pp, first=first)
    assert Values(config_of(**fields)).longest_stage == max(len(stage.layers) for stage in stages)


def test_the_flags_of_megatron_lm():
    line = "--mock-data --vocab-size 512 --recompute-granularity full --recompute-method block --recompute-num-layers 2"
    memory = load_config(line.split()).memory
    assert (memory.recompute_granularity, memory.recompute_method, memory.recompute_num_layers) == (
        "full",
        "block",
        2,
    )
    line = "--mock-data --vocab-size 512 --recompute-activations --recompute-modules core_attn layernorm"
    memory = load_config(line.split()).memory
    assert memory.recompute_granularity == "selective" and memory.recompute_modules == [
        "core_attn",
        "layernorm",
    ]
    with pytest.raises(ConfigError, match="--recompute-activations contradicts"):
        load_config([*line.split(), "--recompute-granularity", "full"])


def test_the_longest_stage_of_a_layout_is_counted():
    layout = PP2 | {"num_layers": 6, "pipeline_model_parallel_layout": "Et|tttttL"}
    validate(
        config_of(**layout, **FULL, recompute_method="block", recompute_num_layers=5), to_train=True
    )
    with pytest.raises(ConfigError, match="the longest of 2 pipeline stages has 5 of 6 layers"):
        validate(
            config_of(**layout, **FULL, recompute_method="block", recompute_num_layers=6),
            to_train=True,
        )
