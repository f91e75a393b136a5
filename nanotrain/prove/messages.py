"""`MessageTypes`: the types of messages between pipeline stages, part by part.

    [hidden | key of layer 12 | value of layer 12 | input of layer 14 | ...]

Hidden states and their gradients are equal over tp, or sharded with sequence parallelism; keys and
values are of the heads of a tp rank. What a rank receives is typed so, and what it sends must be.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from nanotrain.comm.recorder import place
from nanotrain.parallel.pp.actions import Action, ActionKind
from nanotrain.parallel.pp.transfers import TransferBatch
from nanotrain.plan.model_plan import stage_specs
from nanotrain.plan.plan import Plan
from nanotrain.prove.axes import Axes
from nanotrain.prove.rules import TypedRecorder
from nanotrain.prove.types import ZERO, Piece, Type
from nanotrain.spec.layer_sizes import LayerSizes
from nanotrain.spec.residuals import stream_width
from nanotrain.spec.shared_state import SHARED, SharedState, tensor_widths


class _Part(NamedTuple):
    """A tensor of a message."""

    what: str
    width: int  # elements per hidden state
    varying: int  # axes along which its values, and their gradients, may differ


class MessageTypes:
    """The messages of one rank.

    Args:
        plan: plan of the rank.
        axes: axes of the topology.
        recorder: types of the tensors of the rank.
    """

    def __init__(self, plan: Plan, *, axes: Axes, recorder: TypedRecorder) -> None:
        parallel = plan.config.parallel
        tp = parallel.tensor_model_parallel_size
        self._shape = plan.shape
        self._axes = axes
        self._recorder = recorder
        self._stages = stage_specs(parallel, plan.shape)
        self._sizes = LayerSizes(
            plan.shape,
            batch_size=1,
            seq_length=tp,
            tp=tp,
            sequence_parallel=parallel.sequence_parallel,
        )
        self._tokens = axes.masks["dp_cp"]
        self._heads = self._tokens | axes.masks["tp"]
        self._hidden = self._heads if parallel.sequence_parallel else self._tokens

    def start_transfers(self, original: Callable[..., None]) -> Callable[..., None]:
        """`_Step.start_transfers`: check the types of sent tensors, set the types of received."""

        def wrapper(step: Any, batch: TransferBatch) -> None:
            for send in batch.sends:
                self._check(step.outbox[send.to], send.to)
            original(step, batch)
            for receive in batch.receives:
                message = step.inbox[receive.to].wait()
                pieces = []
                for elements, part in self._elements(message, receive.to):
                    kind = Type(part.varying | self._axes.masks["pp"])
                    pieces.append(Piece(elements.start, elements.stop, kind))
                self._recorder.types.write(message, pieces)

        return wrapper

    def _check(self, message: Tensor, to: Action) -> None:
        """Check that a message has the types that its receiver assumes."""
        stages = self._axes.masks["pp"]
        flat = message.reshape(-1)
        for elements, part in self._elements(message, to):
            kind = self._recorder.types.of(flat[elements])
            wrong = 0 if kind is ZERO else kind.differs & ~part.varying & ~stages
            if wrong:
                self._recorder.fault(
                    f"a stage sends {part.what} that vary over {self._axes.describe(wrong)}, "
                    f"where they should be equal, at {place()}"
                )

    def _elements(self, message: Tensor, to: Action) -> list[tuple[slice, _Part]]:
        """The parts of a message to an action, and where they are in it."""
        parts = self._parts(to)
        num_hidden = message.numel() // sum(part.width for part in parts)
        elements = []
        first = 0
        for part in parts:
            last = first + num_hidden * part.width
            elements.append((slice(first, last), part))
            first = last
        return elements

    def _parts(self, to: Action) -> list[_Part]:
        """The parts of a message to an action: hidden states, and state for later layers."""
        stage = self._stages[to.stage]
        is_forward = to.kind is ActionKind.forward
        what = "hidden states" if is_forward else "gradients of hidden states"
        parts = [_Part(what, stream_width(self._shape), self._hidden)]
        for source in self._shape.carried(stage.first_layer if is_forward else stage.last_layer):
            for width in tensor_widths(self._sizes, source):
                what = f"values of {source.kind} {source.layer}"
                if not is_forward:
                    what = f"gradients of {source.kind} {source.layer}"
                parts.append(_Part(what, width, self._varying(SHARED[source.kind])))
        return parts

    def _varying(self, state: SharedState) -> int:
        """The axes along which a kind of state varies."""
        if state.is_of_heads:
            return self._heads
        return self._hidden if state.is_outside else self._tokens
