"""`TypedRecorder`: types of the results of operators and collectives, without a run."""

import pytest
import torch
from torch import Tensor

from nanotrain.comm.recorder import Call
from nanotrain.config.parallel import ParallelConfig
from nanotrain.prove.axes import Axes
from nanotrain.prove.rules import TypedRecorder
from nanotrain.prove.types import ZERO, Type
from nanotrain.topology.topology import Topology

TP = (0, 1)
DP = (0, 2)
TOPOLOGY = Topology.of(
    ParallelConfig(tensor_model_parallel_size=2, pipeline_model_parallel_size=2), 8
)
AXES = Axes.of(TOPOLOGY)
IN_TP = AXES.masks["tp"]
IN_DP = AXES.masks["dp"]


@pytest.fixture
def recorder() -> TypedRecorder:
    return TypedRecorder(AXES, 0)


def typed(recorder: TypedRecorder, kind: Type | None, *shape: int) -> Tensor:
    tensor = torch.empty(*(shape or (4,)), device="meta")
    recorder.types.set(tensor, kind)
    return tensor


def call(op: str, ranks: tuple[int, ...], *, reduction: str = "sum") -> Call:
    return Call(ranks, op, f"4 float32 {reduction}", 16, "here", 0)


def gradient(**masks: int) -> Type:
    return Type(factor=1.0, name="weight", **masks)


def test_a_result_varies_where_an_input_does(recorder: TypedRecorder) -> None:
    weight = typed(recorder, Type(IN_TP), 4, 4)
    tokens = typed(recorder, Type(IN_DP), 4, 4)
    with recorder:
        product = tokens @ weight.t()
        zeros = torch.zeros(4, device="meta")
        shifted = torch.arange(4, device="meta") + 1
        zeros += shifted
        zeros[2:] = product[0, 2:]
    assert recorder.types.of(product) == Type(IN_TP | IN_DP)
    assert recorder.types.of(shifted) == recorder.types.of(zeros[:2]) == Type()
    assert recorder.types.of(zeros[2:]) == Type(IN_TP | IN_DP)


def test_the_output_of_an_operator_is_not_its_input(recorder: TypedRecorder) -> None:
    stale = typed(recorder, Type(IN_TP), 4, 4)
    tokens = typed(recorder, Type(IN_DP), 4, 4)
    with recorder:
        torch.mm(tokens, tokens, out=stale)
    assert recorder.types.of(stale) == Type(IN_DP)


def test_a_sum_over_an_axis_makes_values_equal(recorder: TypedRecorder) -> None:
    tensor = typed(recorder, Type(IN_TP | IN_DP))
    recorder.add_call(call("all_reduce", TP), inputs=[], outputs=[tensor])
    assert recorder.types.of(tensor) == Type(IN_DP)
    assert not recorder.faults
    recorder.add_call(call("all_reduce", TP, reduction="max"), inputs=[], outputs=[tensor])
    assert not recorder.faults
    recorder.add_call(call("all_reduce", TP), inputs=[], outputs=[tensor])
    (fault,) = recorder.faults
    assert fault == "values that are equal already are summed over tp, by all_reduce at here"


def test_a_gradient_is_summed_once_over_axes_that_do_not_shard_it(
    recorder: TypedRecorder,
) -> None:
    grad = typed(recorder, gradient(varying=IN_TP, partial=IN_DP))
    shard = torch.empty(2, device="meta")
    recorder.add_call(call("reduce_scatter", DP), inputs=[grad], outputs=[shard])
    assert recorder.types.of(shard) == gradient(varying=IN_TP | IN_DP)
    assert not recorder.faults and recorder.num_sums == 1
    recorder.add_call(call("all_reduce", TP), inputs=[], outputs=[shard])
    assert "shards of the gradient of weight are added over tp" in next(iter(recorder.faults))
    done = typed(recorder, gradient(varying=IN_TP))
    recorder.add_call(call("all_reduce", DP), inputs=[], outputs=[done])
    assert "weight, summed already, is summed again over dp" in [*recorder.faults][1]


def test_an_exchange_and_a_local_sum_are_a_reduce_scatter(recorder: TypedRecorder) -> None:
    grad = typed(recorder, gradient(partial=IN_DP), 8)
    recorder.types.set(grad[2:], gradient(varying=IN_TP, partial=IN_DP))
    rows = torch.empty(2, 4, device="meta")
    recorder.add_call(call("all_to_all", DP), inputs=[grad.view(2, 4)], outputs=[rows])
    with recorder:
        total = rows.sum(0, dtype=torch.float32)
        total.div_(2)
    kinds = [recorder.types.of(part) for part in total.split(2)]
    assert [kind.varying for kind in kinds if kind] == [IN_DP, IN_TP | IN_DP]
    assert [kind.factor for kind in kinds if kind] == [0.5, 0.5]
    assert not recorder.faults
    recorder.add_call(call("all_to_all", TP), inputs=[grad.view(2, 4)], outputs=[rows])
    assert "summed already, is summed again over tp" in next(iter(recorder.faults))


def test_a_mean_divides_by_its_ranks(recorder: TypedRecorder) -> None:
    grad = typed(recorder, gradient(partial=IN_DP))
    with recorder:
        grad.mul_(4.0)
    recorder.add_call(call("all_reduce", DP, reduction="avg"), inputs=[], outputs=[grad])
    kind = recorder.types.of(grad)
    assert kind is not None and kind.factor == 2.0


def test_parameters_in_one_buffer_keep_their_types(recorder: TypedRecorder) -> None:
    flat = typed(recorder, ZERO, 8)
    kinds = [gradient(partial=IN_DP), gradient(varying=IN_TP, partial=IN_DP)]
    recorder.types.set(flat[:4], kinds[0])
    recorder.types.set(flat[4:], kinds[1])
    with recorder:
        halves = [*flat.split(4)]
        copy = flat.to(torch.bfloat16)
        joined = torch.cat(halves)
        flat.add_(joined)
    for tensor in (flat, copy, joined):
        assert [recorder.types.of(part) for part in tensor.split(4)] == kinds
    with recorder:
        torch._foreach_mul_([flat], 0.5)
    assert [recorder.types.of(part).varying for part in flat.split(4)] == [0, IN_TP]  # type: ignore[union-attr]


def test_an_equal_value_is_not_added_to_a_partial_sum(recorder: TypedRecorder) -> None:
    tensor = typed(recorder, Type(partial=IN_TP))
    bias = typed(recorder, Type())
    with recorder:
        assert recorder.types.of(tensor + tensor) == Type(partial=IN_TP)
        assert recorder.types.of(tensor.square()) == Type(IN_TP)
        tensor += bias
    assert "equal over tp are added to a partial sum" in next(iter(recorder.faults))


def test_gathered_shards_are_equal(recorder: TypedRecorder) -> None:
    full = typed(recorder, Type(), 8)
    recorder.types.set(full[4:], Type(IN_TP))
    recorder.types.set(full[:4], Type(IN_DP))  # this rank's, updated
    recorder.add_call(call("all_gather", DP), inputs=[full[:4]], outputs=[full])
    assert [recorder.types.of(part) for part in full.split(4)] == [Type(), Type(IN_TP)]


def test_parts_of_a_gathered_tensor_keep_their_types(recorder: TypedRecorder) -> None:
    key = typed(recorder, Type(IN_TP | IN_DP), 2, 3)
    index_key = typed(recorder, Type(IN_DP), 2, 1)
    with recorder:
        joined = torch.cat((key, index_key), dim=-1)
    gathered = torch.empty(2, 2, 4, device="meta")
    recorder.add_call(call("all_gather", DP), inputs=[joined], outputs=[gathered])
    with recorder:
        full = torch.cat(gathered.unbind(), dim=0)
        parts = full.split((3, 1), dim=-1)
        scaled = parts[1].contiguous() * 2
    assert [recorder.types.of(part) for part in parts] == [Type(IN_TP), Type()]
    assert recorder.types.of(scaled) == Type()
    grads = typed(recorder, Type(IN_TP | IN_DP), 2, 4, 4)
    recorder.types.set(grads[..., 3:], Type(IN_DP))
    local = torch.empty(1, 4, 4, device="meta")
    recorder.add_call(call("reduce_scatter", DP), inputs=[grads], outputs=[local])
    kinds = [recorder.types.of(part) for part in local.split((3, 1), dim=-1)]
    assert kinds == [Type(IN_TP | IN_DP), Type(IN_DP)]


def test_an_all_to_all_of_equal_parts_is_an_all_gather(recorder: TypedRecorder) -> None:
    rows = typed(recorder, Type(IN_TP | IN_DP), 3, 4)
    outputs = [torch.empty(6, 4, device="meta") for _ in range(4)]
    with recorder:
        repeated = rows.repeat(2, 1)
        expanded = rows.expand(2, 3, 4).reshape(6, 4)
        other = torch.cat((rows, rows * 2))
        changed = rows.repeat(2, 1)
        changed[3:] += 1
    for sent, output in zip((repeated, expanded, other, changed), outputs, strict=True):
        sends = call("all_to_all", TP)._replace(splits=((3, 3), (4, 2)))
        recorder.add_call(sends, inputs=[sent], outputs=[output])
    is_equal, is_other = Type(IN_DP), Type(IN_TP | IN_DP)
    kinds = [recorder.types.of(output) for output in outputs]
    assert kinds == [is_equal, is_equal, is_other, is_other]
    # parts of other sizes than the copies
    uneven = call("all_to_all", TP)._replace(splits=((2, 4), (3, 3)))
    recorder.add_call(uneven, inputs=[repeated], outputs=[outputs[0]])
    assert recorder.types.of(outputs[0]) == is_other


def test_a_ring_passes_on_what_it_sends(recorder: TypedRecorder) -> None:
    received = torch.empty(4, device="meta")
    recorder.add_call(call("receive", DP), inputs=[], outputs=[received])
    assert recorder.types.of(received) == Type(AXES.world)
    recorder.add_call(call("send", DP), inputs=[typed(recorder, Type(IN_TP))], outputs=[])
    assert recorder.types.of(received) == Type(IN_TP | IN_DP)


def test_random_numbers_have_no_type(recorder: TypedRecorder) -> None:
    with recorder:
        torch.empty(4, device="meta").bernoulli_(0.5)
    assert "bernoulli_.float draws random numbers" in next(iter(recorder.faults))
