"""`MessageTypes`: what stages send is typed part by part."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from nanotrain.cli.dry_run import complete
from nanotrain.comm.work import Work
from nanotrain.config.flags import parse
from nanotrain.config.load import load_line
from nanotrain.parallel.pp.actions import Action, forward, full_backward
from nanotrain.parallel.pp.transfers import Transfer, TransferBatch
from nanotrain.plan.plan import plan_run
from nanotrain.prove.axes import Axes
from nanotrain.prove.messages import MessageTypes
from nanotrain.prove.rules import TypedRecorder
from nanotrain.prove.types import Type

# the last two layers read the keys and values of layers 0 and 1, and every layer an input
LINE = (
    "+config=tiny --vocab-size 512 --num-layers 4 --num-kv-shared-layers 2 --layer-input-size 8 "
    "--window-size 4 --window-attn-skip-freq 2 --num-query-groups 4 "
    "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
)
NUM_HIDDEN = 6


class Sending:
    """The messages of the first of two stages."""

    def __init__(self, *flags: str) -> None:
        config = complete(load_line(parse([*LINE.split(), *flags])))
        plan = plan_run(config, 8, rank=0)
        self.axes = Axes.of(plan.topology)
        self.recorder = TypedRecorder(self.axes, 0)
        self.messages = MessageTypes(plan, axes=self.axes, recorder=self.recorder)
        self.tokens = Type(self.axes.masks["dp_cp"])
        self.heads = Type(self.axes.masks["dp_cp"] | self.axes.masks["tp"])

    def message(self, to: Action) -> Tensor:
        widths = [part.width for part in self.messages._parts(to)]
        return torch.empty(NUM_HIDDEN * sum(widths), device="meta")

    def parts(self, message: Tensor, to: Action) -> list[tuple[str, Tensor]]:
        return [(part.what, message[place]) for place, part in self.messages._elements(message, to)]

    def transfer(self, *, sent: dict[Action, Tensor], received: dict[Action, Tensor]) -> None:
        works = {action: Work.completed(message) for action, message in received.items()}
        step = SimpleNamespace(outbox=sent, inbox=works)
        sends = tuple(Transfer(action, 1) for action in sent)
        receives = tuple(Transfer(action, 1) for action in received)
        start = self.messages.start_transfers(lambda step, batch: None)
        start(step, TransferBatch(sends, receives))


def test_hidden_states_are_equal_over_tp_or_sharded() -> None:
    sending = Sending()
    to = forward(1, 0)
    message = sending.message(to)
    names = [name for name, _ in sending.parts(message, to)]
    assert names[0] == "hidden states"
    assert {"values of key_value 1", "values of layer_input 2"} < set(names)
    sending.transfer(sent={}, received={full_backward(0, 0): message})
    pp = sending.axes.masks["pp"]
    for name, part in sending.parts(message, to):
        expected = sending.heads if "key_value" in name else sending.tokens
        assert sending.recorder.types.of(part) == Type(expected.varying | pp), name


@pytest.mark.parametrize("flags", [(), ("--sequence-parallel",)])
def test_a_part_that_varies_over_tp_is_a_fault(flags: tuple[str, ...]) -> None:
    sending = Sending(*flags)
    to = forward(1, 0)
    message = sending.message(to)
    types = sending.recorder.types
    types.set(message, sending.tokens)
    for name, part in sending.parts(message, to):
        if "key_value" in name:
            types.set(part, sending.heads)
    sending.transfer(sent={to: message}, received={})
    assert not sending.recorder.faults
    for name, part in sending.parts(message, to):
        types.set(part, sending.heads)
        sending.transfer(sent={to: message}, received={})
        text = f"a stage sends {name} that vary over tp, where they should be equal"
        is_equal = not flags and "key_value" not in name
        assert any(text in fault for fault in sending.recorder.faults) == is_equal
