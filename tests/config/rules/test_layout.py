"""Rules between the model and its layout. The default model: 4 layers, 4 heads, 256 wide, 704
inside the MLP.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanotrain.config.rules.check import check_layout
from nanotrain.errors import ConfigError
from tests.config.asking import config_of

TP2 = {"tensor_model_parallel_size": 2}
SPARSE = {"multi_latent_attention": True, "q_lora_rank": 24, "sparse_attention_type": "dsa"}
DELTA = {"linear_attention_type": "gated_delta_net", "linear_num_key_heads": 1}
CP2 = {"context_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
EP2 = {"expert_model_parallel_size": 2}
EXPERTS = {"num_experts": 8}


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
        TP2 | {"make_vocab_size_divisible_by": 3},
        EXPERTS | {"moe_ffn_hidden_size": 99, "expert_tensor_parallel_size": 1} | TP2,
    ],
)
def test_what_divides_breaks_no_rule(keys):
    check_layout(config_of(**keys))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
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
