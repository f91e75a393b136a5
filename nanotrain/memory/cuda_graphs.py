"""CUDA graphs of parts of blocks: the host launches a part at once instead of kernel by kernel.

    capture_parts   replaces the parts of blocks (graph_parts.py) by graphed ones
    StageGraphs     what the parts of a stage share
    GraphedPart     a part, eager in its first passes, then captured
    Slot            the two graphs of a part for one microbatch in flight

A part is captured once for each microbatch between its forward and its backward, because what the
forward saves has to stay where the backward graph reads it:

    forward    copy hidden states to the slot's input, replay    -> the slot's output
    backward   copy the gradient to a static buffer, replay      -> the gradient of the input

Graphs read and write fixed addresses. Parameters and the resident gradients of `no_shard` and
`optim` lie in flat buffers, so a backward graph adds weight gradients to them; the first microbatch
of a step sets them to zero before. Amax histories of fp8 layers stay at their addresses too. Random
words of stochastic rounding are an input, copied as hidden states are. Other gradients are copied
from memory that all parts share.
Gradient hooks, waits for parameters and pipeline messages stay outside of graphs.

Temporaries of all graphs share one pool, as graphs run one after another. What a forward saves
stays allocated, so any order of forwards and backwards is right.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from nanotrain.comm.device import GraphPool
from nanotrain.kernels.linear import WriteTarget, attach, grad_view_of
from nanotrain.log import get_logger
from nanotrain.memory.graph_parts import ATTEND, FEED_FORWARD, WHOLE, Part, parts_of
from nanotrain.memory.static_inputs import (
    ContextBuffers,
    NotCapturable,
    StageWords,
    describe,
    differentiable,
    map_tensors,
    tensors_in,
)

log = get_logger(__name__)


class StageGraphs:
    """State that the graphs of a stage share.

    Args:
        num_eager: passes of a part before it is captured.
        words: random words of stochastic rounding that layers read.

    Attributes:
        outputs: static outputs by address, which the next part reads without a copy.
    """

    def __init__(self, num_eager: int, words: StageWords) -> None:
        self.num_eager = num_eager
        self.words = words
        self.pool = GraphPool()
        self.outputs: dict[int, Tensor] = {}
        self._buffers: dict[Any, Tensor] = {}
        self._inputs: dict[int, ContextBuffers] = {}

    def buffer(self, name: Any, like: Tensor) -> Tensor:
        """Static memory with the shape and dtype of a tensor, one per name."""
        key = (name, like.shape, like.dtype)
        if key not in self._buffers:
            self._buffers[key] = torch.empty_like(like, requires_grad=False)
        return self._buffers[key]

    def context_buffers(self, index: int) -> ContextBuffers:
        """The context of the microbatch in the slots with an index."""
        return self._inputs.setdefault(index, ContextBuffers())


class GraphedPart:
    """A part of a block that is replayed from its capture on.

    Passes without gradients, of padding, and while other shapes are in flight run eagerly.

    Args:
        function: the function of the part.
        description: which function of the block it is, and what it reads.
        block: its block.
        graphs: what the parts of the stage share.
        place: its place among the parts of the stage.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        description: Part,
        *,
        block: nn.Module,
        graphs: StageGraphs,
        place: "_Place",
    ) -> None:
        self.function = function
        self.description = description
        self.graphs = graphs
        self.place = place
        self._block = block
        self._num_passes = 0  # backwards of eager passes that have begun
        self._slots: list[Slot] = []
        self._signature: Any = None
        self._has_warned = False

    def __call__(self, hidden: Tensor, context: Any) -> Any:
        """Run the part: hidden states and the context of the layers -> its output."""
        if not torch.is_grad_enabled() or context.is_padding or not self._is_trained(hidden):
            return self.function(hidden, context)
        if self._num_passes < self.graphs.num_eager:
            return self._run_eagerly(hidden, context)
        slot = self._free_slot(hidden, self._read_inputs(context))
        if slot is None:
            return self.function(hidden, context)
        outputs = _Replay.apply(slot, hidden, *slot.params)
        return slot.rebuild(outputs)

    def _is_trained(self, hidden: Tensor) -> bool:
        """Whether the part has a backward."""
        return hidden.requires_grad or any(param.requires_grad for param in self._all_params)

    def _run_eagerly(self, hidden: Tensor, context: Any) -> Any:
        """A pass that loads and compiles kernels, which a capture could not."""

        def count(_: Tensor) -> None:
            self._num_passes += 1

        result = self.function(hidden, context)
        outputs = differentiable(result)
        if outputs:
            outputs[0].register_hook(count)
        return result

    @property
    def params(self) -> list[nn.Parameter]:
        """The trained parameters of the part."""
        return [param for param in self._all_params if param.requires_grad]

    @cached_property
    def _all_params(self) -> list[nn.Parameter]:
        """The parameters of the part; read first in a step, when they have their storage."""
        params: dict[nn.Parameter, None] = {}
        for path in self.description.modules:
            module = attrgetter(path)(self._block) if path else self._block
            params |= dict.fromkeys(module.parameters())
        return list(params)

    def _read_inputs(self, context: Any) -> "_Inputs":
        """The fields of the context that the part reads, and random words."""
        values = {name: getattr(context, name) for name in self.description.reads}
        dropout = values.get("dropout")
        if dropout is not None:
            # words of a layer are computed in the graph
            values["dropout"] = replace(dropout, layer_words=None)
        return _Inputs(type(context)(**values), self.graphs.words.tokens)

    def _free_slot(self, hidden: Tensor, inputs: "_Inputs") -> "Slot | None":
        """A slot that holds the inputs; None where the part has to run eagerly."""
        try:
            described = describe(inputs)
        except NotCapturable as reason:
            self._warn(str(reason))
            return None
        signature = (hidden.shape, hidden.dtype, hidden.requires_grad, described)
        if signature != self._signature:
            if any(slot.is_in_flight for slot in self._slots):
                self._warn("microbatches of other shapes are in flight")
                return None
            self._free_slots()
            self._signature = signature
        for slot in self._slots:
            if slot.is_in_flight:
                continue
            if slot.load(hidden, inputs):
                return slot
            self._warn("the part before it ran eagerly")
            return None
        slot = Slot(self, hidden, inputs=inputs, index=len(self._slots))
        self._slots.append(slot)
        return slot

    def _free_slots(self) -> None:
        """Discard the graphs of another shape."""
        for slot in self._slots:
            for output in slot.outputs:
                self.graphs.outputs.pop(output.data_ptr(), None)
        self._slots = []

    def _warn(self, reason: str) -> None:
        """Log, once, that the part runs without its graphs."""
        if not self._has_warned:
            log.warning(
                "CUDA graphs: %s of a layer runs eagerly: %s", self.description.path, reason
            )
            self._has_warned = True


@dataclass(frozen=True)
class _Inputs:
    """The inputs of a part in addition to hidden states."""

    context: Any
    tokens: Tensor | None  # random words of stochastic rounding


@dataclass(frozen=True)
class _Place:
    """The place of a part among the parts of a stage."""

    is_first: bool
    is_last: bool


class Slot:
    """The graphs of a part for one microbatch in flight, and their static tensors.

    Args:
        part: the part.
        hidden: hidden states to capture with.
        inputs: other inputs to capture with.
        index: index of the slot.
    """

    def __init__(self, part: GraphedPart, hidden: Tensor, *, inputs: _Inputs, index: int) -> None:
        self.part = part
        self.graphs = part.graphs
        self.params = part.params
        self.is_in_flight = False
        self._context = self.graphs.context_buffers(index)
        # the static output of the part before this one, where the hidden states are that output
        linked = self.graphs.outputs.get(hidden.data_ptr())
        self._is_linked = linked is not None and linked.shape == hidden.shape
        if linked is not None and self._is_linked:
            self.hidden = linked.detach()
        else:
            self.hidden = hidden.detach().clone()
        self.hidden.requires_grad_(hidden.requires_grad)
        static: _Inputs = map_tensors(inputs, self._context.load)
        with (
            self.graphs.words.reading(static.tokens),
            self.graphs.pool.capture() as self._forward_graph,
        ):
            self._result = part.function(self.hidden, static.context)
        self.outputs = tensors_in(self._result)
        if part.description.is_link:
            self.graphs.outputs[self.outputs[0].data_ptr()] = self.outputs[0]
        with self.graphs.words.reading(static.tokens):
            self._capture_backward()

    def load(self, hidden: Tensor, inputs: _Inputs) -> bool:
        """Copy the inputs of a microbatch; False if a linked input is at another address."""
        is_in_place = hidden.data_ptr() == self.hidden.data_ptr()
        if self._is_linked and not is_in_place:
            return False
        if not is_in_place:
            self.hidden.detach().copy_(hidden.detach())
        map_tensors(inputs, self._context.load)
        return True

    def rebuild(self, tensors: Sequence[Tensor]) -> Any:
        """The result of the function with these tensors."""
        remaining = iter(tensors)
        return map_tensors(self._result, lambda *_: next(remaining))

    def forward(self) -> list[Tensor]:
        """Replay the forward; returns its outputs."""
        assert not self.is_in_flight, "its backward has to read what it saves first"
        self.is_in_flight = True
        self._context.num_in_flight += 1
        self._forward_graph.replay()
        outputs = [output.detach() for output in self.outputs]
        if self.part.place.is_last:
            # the next stage may read it while the slot is used again
            outputs = [output.clone() for output in outputs]
        return outputs

    def backward(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Replay the backward; returns the gradients of the hidden states and of the parameters.

        None for a gradient that the graph added to the gradient buffer.
        """
        assert self.is_in_flight, "a graph has one backward per forward"
        given = [grad for grad, output in zip(grads, self.outputs, strict=True) if output.grad_fn]
        for static, grad in zip(self._output_grads, given, strict=True):
            _copy_grad(static, grad)
        self._start_writes()
        self._backward_graph.replay()
        self.is_in_flight = False
        self._context.num_in_flight -= 1
        hidden_grad = self._hidden_grad
        if hidden_grad is not None and not self._passes_on:
            hidden_grad = hidden_grad.clone()
        param_grads: list[Tensor | None] = []
        for param in self.params:
            returned = self._returned.get(param)
            param_grads.append(None if returned is None else returned.clone())
        return [hidden_grad, *param_grads]

    @property
    def _passes_on(self) -> bool:
        """Whether the gradient of the hidden states is read before its memory is written again."""
        return self.part.description.is_link and not self.part.place.is_first

    def _capture_backward(self) -> None:
        """Capture the gradients of the hidden states and the parameters."""
        outputs = differentiable(self._result)
        self._output_grads = [
            self.graphs.buffer(self._grad_name(offset=1, number=number), output)
            for number, output in enumerate(outputs)
        ]
        targets = _gradient_memory(self.params)
        inputs: list[Tensor] = [*self.params]
        if self.hidden.requires_grad:
            inputs = [self.hidden, *self.params]
        self._hidden_grad: Tensor | None = None
        if self.hidden.requires_grad:
            name = self._grad_name(offset=0, number=0)
            self._hidden_grad = self.graphs.buffer(name, self.hidden)
        self._returned: dict[nn.Parameter, Tensor] = {}
        self._added: dict[nn.Parameter, Tensor] = {}
        with (
            self.graphs.pool.capture() as self._backward_graph,
            _adding_to(targets, self.params) as written,
        ):
            grads = [
                *torch.autograd.grad(
                    outputs, inputs, self._output_grads, retain_graph=True, allow_unused=True
                )
            ]
            if self._hidden_grad is not None:
                self._hidden_grad.copy_(grads.pop(0))
            for param, grad in zip(self.params, grads, strict=True):
                self._keep_param_grad(param, grad, target=targets.get(param))
        for param in written:
            self._added[param] = targets[param]

    def _grad_name(self, *, offset: int, number: int) -> Any:
        """The name of the memory of gradients: of all links one, which a graph reads and writes."""
        if self.part.description.is_link:
            return "link"
        return self.part.description.path, offset, number

    def _keep_param_grad(
        self, param: nn.Parameter, grad: Tensor | None, *, target: Tensor | None
    ) -> None:
        """Add a gradient to the gradient buffer, or copy it to memory that parts share."""
        if grad is None:
            return
        if target is not None:
            target.add_(grad)
            self._added[param] = target
            return
        number = len(self._returned)
        self._returned[param] = self.graphs.buffer(("param", number), grad)
        self._returned[param].copy_(grad)

    def _start_writes(self) -> None:
        """Prepare the gradient buffer; gradients that are the first ones of a step start at 0."""
        firsts = []
        for param, memory in self._added.items():
            view = grad_view_of(param)
            target = None if view is None else view.start_write()
            if target is None:
                raise RuntimeError(
                    "CUDA graphs add weight gradients to the gradient buffer, and this backward is "
                    "outside of a training step: use --cuda-graph-impl none"
                )
            elements, has_grads = target
            assert elements.data_ptr() == memory.data_ptr(), "the gradient buffer has moved"
            if not has_grads:
                firsts.append(memory)
        if firsts:
            torch._foreach_zero_(firsts)


def _copy_grad(static: Tensor, grad: Tensor | None) -> None:
    """Copy a gradient to static memory, unless it is there; None is zero."""
    if grad is None:
        static.zero_()
    elif grad.data_ptr() != static.data_ptr():
        static.copy_(grad)


def _gradient_memory(params: Sequence[nn.Parameter]) -> dict[nn.Parameter, Tensor]:
    """The gradient memory of the parameters where it stays at one address."""
    memory = {}
    for param in params:
        view = grad_view_of(param)
        if view is not None and view.memory is not None:
            memory[param] = view.memory
    return memory


@contextmanager
def _adding_to(
    targets: dict[nn.Parameter, Tensor], params: Sequence[nn.Parameter]
) -> Iterator[set[nn.Parameter]]:
    """Let products add weight gradients to `targets`; products of other parameters return theirs.

    Yields the parameters whose gradients a product has added.
    """
    written: set[nn.Parameter] = set()

    def start_write(param: nn.Parameter) -> WriteTarget | None:
        if param not in targets:
            return None
        written.add(param)
        return targets[param], True

    views = {}
    for param in params:
        view = grad_view_of(param)
        if view is not None:
            views[param] = view
    try:
        for param, view in views.items():
            start = partial(start_write, param)
            in_graph = None if view.start_write_in_graph is None else start
            attach(replace(view, start_write=start, start_write_in_graph=in_graph), param)
        yield written
    finally:
        for param, view in views.items():
            attach(view, param)


class _Replay(torch.autograd.Function):
    """The replay of a part: its graphs have their own autograd graph."""

    @staticmethod
    def forward(ctx: Any, slot: Slot, hidden: Tensor, *params: Tensor) -> tuple[Tensor, ...]:
        """Replay the forward of inputs that the slot holds."""
        ctx.slot = slot
        outputs = slot.forward()
        constant = [
            output
            for output, captured in zip(outputs, slot.outputs, strict=True)
            if not captured.grad_fn
        ]
        ctx.mark_non_differentiable(*constant)
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Replay the backward."""
        return None, *ctx.slot.backward(grads)


def capture_parts(blocks: Sequence[nn.Module], scope: Sequence[str], *, num_eager: int) -> None:
    """Replace the functions of the parts of blocks, in place.

    Args:
        blocks: consecutive blocks of a stage.
        scope: values of `--cuda-graph-scope`; empty: all parts that can be captured.
        num_eager: passes of a part before it is captured.
    """
    parts = [(block, part) for block in blocks for part in parts_of(block, scope)]
    if not parts:
        return
    graphs = StageGraphs(num_eager, StageWords(blocks))
    first_block = blocks[0]
    last_block = blocks[-1]
    for block, part in parts:
        is_first = block is first_block and part in (WHOLE, ATTEND)
        is_last = block is last_block and part in (WHOLE, FEED_FORWARD)
        place = _Place(is_first=is_first, is_last=is_last)
        function = attrgetter(part.path)(block)
        graphed = GraphedPart(function, part, block=block, graphs=graphs, place=place)
        owner, _, name = part.path.rpartition(".")
        setattr(attrgetter(owner)(block) if owner else block, name, graphed)
        if part in (ATTEND, FEED_FORWARD):
            block.forward = attrgetter("in_halves")(block)
