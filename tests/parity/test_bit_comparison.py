"""Nothing that one rank, or a layout, lacks passes as equal bits."""

import math
from collections.abc import Callable
from dataclasses import replace
from unittest.mock import patch

from torch import nn

from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.config.config import Config
from nanotrain.parity import bits
from nanotrain.parity.bit_comparison import Step, compare_steps
from tests.harness import run_ranks
from tests.parity.test_bits import TP_CP, configs, first_difference, of_one_rank, record


class WithoutALayer(bits._HiddenRecorder):
    """Drops the hook of layer 1."""

    def attach(self, stage: nn.Module) -> None:
        super().attach(stage)
        stage.get_submodule("layers.1")._forward_hooks.clear()


def record_without_a_layer(ctx: ParallelContext, config: Config) -> list[Step]:
    with patch.object(bits, "_HiddenRecorder", WithoutALayer):
        return record(ctx, config)


def test_an_output_that_was_not_recorded_is_a_difference() -> None:
    _, single = configs(*TP_CP, world=4)
    whole = of_one_rank(single)
    (part,) = run_ranks(1, record_without_a_layer, single, shares=True)
    name = "step 1, output of layers.1: "
    assert first_difference(whole, [part]).startswith(f"{name}no rank has ")
    assert first_difference(part, [whole]) == f"{name}one rank has not recorded it"
    part[0].layers = ()
    assert first_difference(part, [whole]) == f"{name}rank 0 has it, one rank has not"


def test_what_no_rank_or_only_the_layout_has_is_a_difference() -> None:
    _, single = configs(*TP_CP, world=4)
    reference = of_one_rank(single)

    def difference(change: Callable[[Step], object], *, of_one: bool = False) -> str:
        """The difference of step 1 after a change of the layout, or of one rank."""
        changed = copy_of(reference[0])
        change(changed)
        if of_one:
            return first_difference([changed], [[reference[0]]])
        return first_difference(reference[:1], [[changed]])

    name = "layers.0.mlp"
    sample = int(reference[0].forward[name][-1].samples[0])
    assert f"{name}: no rank has " in difference(lambda step: step.forward[name].pop())
    assert f" of sample {sample}" in difference(lambda step: step.backward[name].pop())
    gradient = f"step 1, gradient of the output of {name}: "
    text = difference(lambda step: step.backward[name].pop(), of_one=True)
    assert text == f"{gradient}one rank has not recorded it"
    text = difference(lambda step: step.forward[name].pop(), of_one=True)
    assert text == f"step 1, output of {name}: rank 0 has sample {sample}, one rank has not"
    text = difference(lambda step: step.backward.pop(name), of_one=True)
    assert text == f"{gradient}rank 0 has it, one rank has not"
    box = next(iter(reference[0].grads))
    text = difference(lambda step: step.grads.pop(box))
    assert text == f"step 1, gradient {box.name}: no rank has {math.prod(box.shape):,} elements"
    text = difference(lambda step: step.weights.pop(box), of_one=True)
    assert text == f"step 1, updated {box.name}: rank 0 has it, one rank has not"


def copy_of(step: Step) -> Step:
    """A step whose tables may be changed."""
    forward = {name: list(hidden) for name, hidden in step.forward.items()}
    backward = {name: list(hidden) for name, hidden in step.backward.items()}
    return replace(
        step, forward=forward, backward=backward, grads=dict(step.grads), weights=dict(step.weights)
    )


def test_outputs_without_gradients_are_counted_and_named() -> None:
    _, single = configs(*TP_CP, world=4)
    step = copy_of(of_one_rank(single)[0])
    del step.backward["layers.0.mlp"]
    result = compare_steps([step], [[step]])
    assert result.num_left_out == 1 and not result.difference
    report = bits.BitReport(4, 1, result.num_tensors, result.num_left_out, result.difference)
    ending = "; not compared: 1 gradient of hidden states, which one rank does not compute"
    assert report.text().endswith(ending)
