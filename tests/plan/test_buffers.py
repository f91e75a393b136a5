"""Which parameters lie in one buffer."""

from nanotrain.plan.buffers import BufferPlan
from nanotrain.plan.plan import plan_run
from tests.laws.worlds import Case, config_of

EXPERTS = {"num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 32}
FP8 = {"fp8_format": "hybrid", "fp8_param_gather": True, "params_dtype": "bf16"}
SIZES = {"hidden_size": 64, "ffn_hidden_size": 64}


def kind(buffer: BufferPlan) -> tuple[bool, bool, bool]:
    """Whether a buffer is trained, of experts, and in fp8; the same for all of its parameters."""
    (is_trained,) = {param.spec.is_trainable for param in buffer.layout.params}
    (is_expert,) = {param.spec.is_expert for param in buffer.layout.params}
    return is_trained, is_expert, buffer.is_fp8


def buffers_of(case: Case) -> list[BufferPlan]:
    (stage,) = plan_run(config_of(case), 1, rank=0).stages
    names = [param.spec.name for buffer in stage.buffers for param in buffer.layout.params]
    assert sorted(names) == sorted(param.spec.name for param in stage.params)
    return list(stage.buffers)


def test_frozen_parameters_have_buffers_of_their_own_after_the_others() -> None:
    frozen = {"freeze": ["layers.0.*", "embedding.*"]}
    case = Case().but(model=EXPERTS, train={"micro_batch_size": 12})
    assert [kind(buffer) for buffer in buffers_of(case)] == [
        (True, False, False),
        (True, True, False),
    ]
    assert [kind(buffer) for buffer in buffers_of(case.but(optim=frozen))] == [
        (True, False, False),
        (True, True, False),
        (False, False, False),
        (False, True, False),
    ]


def test_frozen_weights_are_not_gathered_in_fp8() -> None:
    case = Case().but(model=SIZES, precision=FP8, train={"micro_batch_size": 12})
    case = case.but(optim={"freeze": ["layers.0.*"]})
    assert [kind(buffer) for buffer in buffers_of(case)] == [
        (True, False, False),
        (True, False, True),
        (False, False, False),
    ]
