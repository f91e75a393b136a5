"""`TypedRecorder`: gives every tensor of a rank on the meta device its type.

Torch's operators see a type per input. Equal inputs give equal results. A result that depends on
varying values varies, however it is computed, and a partial sum stays one under operators that are
linear. Collectives are the only way back: a sum over an axis makes partial or varying values equal.
Sums of values that are equal already, and sums over shards of a gradient, are faults.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nanotrain.comm.recorder import (
    Call,
    InFlight,
    Recorder,
    place,
    tensors_of,
    written_tensors,
)
from nanotrain.prove.axes import Axes
from nanotrain.prove.types import ZERO, Piece, Type, TypeMap, join

# operators whose results have no values yet, or zeros
_EMPTY = {
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "new_zeros",
    "resize_",
    "set_",
    "zero_",
    "zeros",
    "zeros_like",
}
_FILLED = {"fill_", "full", "full_like", "new_full", "new_ones", "ones", "ones_like"}
# operators that are linear in a partial sum
_ADDITIONS = {"add", "add_", "sub", "sub_"}
_PRODUCTS = {"mul", "mul_", "div", "div_", "neg", "neg_"}
_COPIES = {"_to_copy", "clone", "copy", "copy_", "sum", "contiguous"}
_LINEAR = _ADDITIONS | _PRODUCTS | _COPIES
_ELEMENTWISE = _LINEAR - {"sum"}


class _Tensors(NamedTuple):
    """The tensors of a collective."""

    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]


class _Traits(NamedTuple):
    """The facts about an operator that the type of its result depends on."""

    name: str
    has_out: bool  # whether it writes to an argument `out`
    is_random: bool  # whether it draws random numbers; attention does with dropout only


@cache
def _traits(func: Any) -> _Traits:
    """The facts about an operator."""
    draws = torch.Tag.nondeterministic_seeded in func.tags
    return _Traits(
        func.overloadpacket.__name__,
        has_out=func._overloadname.endswith("out"),
        is_random=draws and "attention" not in func.name(),
    )


_EQUAL = Type()
MAX_FAULTS = 20  # kept per rank


class TypedRecorder(Recorder):
    """Types of the tensors of one rank.

    Args:
        axes: axes of the topology.
        rank: the rank.
        shapes: as for `Recorder`.

    Attributes:
        types: types of all tensors.
        faults: descriptions of what is wrong, without repetitions.
        num_sums: sums of gradients that were checked.
        num_operators: operators whose results have a type.
    """

    def __init__(self, axes: Axes, rank: int, *, shapes: dict[Any, Any] | None = None) -> None:
        super().__init__(shapes)
        self.axes = axes
        self.rank = rank
        self.types = TypeMap()
        self.faults: dict[str, None] = {}
        self.num_sums = 0
        # messages that are received before the rank has sent its own, by ranks and size
        self._received: dict[tuple[tuple[int, ...], int], list[Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, and give its results types."""
        kwargs = kwargs or {}
        if func.is_view:
            return func(*args, **kwargs)
        operands = tensors_of((*args, *kwargs.values()))
        result = self._run(func, args, kwargs=kwargs, inputs=operands)
        if _traits(func).is_random and any(tensor.is_meta for tensor in tensors_of((result,))):
            self.fault(
                f"operator {func} draws random numbers, so its result has no type, at {place()}"
            )
        self.num_operators += 1
        self._type_results(func, args, kwargs=kwargs, operands=operands, result=result)
        return result

    def start(self, op: str, **buffers: Any) -> InFlight:
        """An operation whose buffers are not watched."""
        return InFlight(op, place(), [], [])

    def complete(self, operation: InFlight) -> None:
        """Do nothing: operations are complete when they are started."""

    def fault(self, text: str) -> None:
        """Add a fault, unless it is known."""
        if len(self.faults) < MAX_FAULTS:
            self.faults[text] = None

    def add_call(self, call: Call, *, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """Give the results of a collective types."""
        super().add_call(call, inputs=inputs, outputs=outputs)
        if all(tensor.is_meta for tensor in (*inputs, *outputs)):
            getattr(self, f"_{call.op}")(call, _Tensors(inputs, outputs))

    def _type_results(
        self,
        func: Any,
        args: Sequence[Any],
        *,
        kwargs: Mapping[str, Any],
        operands: list[Tensor],
        result: Any,
    ) -> None:
        """Set the types of the tensors that an operator returns or writes."""
        traits = _traits(func)
        name = traits.name
        if traits.has_out:  # the former values of its output are not read
            out = kwargs.get("out")
            operands = [tensor for tensor in operands if tensor is not out]
        written = written_tensors(func, args, kwargs=kwargs)
        targets = written or tensors_of((result,))
        if name in _EMPTY:
            for target in written:
                self.types.set(target, ZERO)
        elif name in _FILLED:
            for target in targets:
                self.types.set(target, _EQUAL)
        elif name == "_foreach_copy_":
            for target, source in zip(args[0], args[1], strict=True):
                self.types.copy(source, target)
        elif name.startswith(("_foreach", "_fused")):
            self._type_lists([*args, *kwargs.values()], targets)
        elif targets:
            self._type_tensors(name, args, operands=operands, targets=targets)

    def _type_tensors(
        self, name: str, args: Sequence[Any], *, operands: list[Tensor], targets: list[Tensor]
    ) -> None:
        """Set the types of the tensors that an operator computes from tensors."""
        target = targets[0]
        if name == "copy_":
            self.types.copy(args[1], target)
        elif name in ("clone", "_to_copy", "repeat"):
            self.types.copy(args[0], target)
            self.types.set_copies(target, _num_copies(name, args))
        elif name == "sum" and self._is_of_versions(args):
            self.types.copy(args[0][0], target)
        elif name in ("cat", "stack"):
            dim = args[1] if len(args) > 1 else 0
            parts = args[0] if name == "cat" else [part.unsqueeze(dim) for part in args[0]]
            self.types.concatenate(parts, target, dim=dim)
        elif name != "_unsafe_view":  # whose result has the memory of its operand
            number = next((item for item in args if isinstance(item, (int, float))), None)
            self._type_values(name, operands, targets=targets, number=number)

    def _type_values(
        self, name: str, operands: Sequence[Tensor], *, targets: Sequence[Tensor], number: Any
    ) -> None:
        """The types of results that depend on all operands."""
        if name in _ELEMENTWISE and any(map(self.types.is_mixed, operands)):
            for target in targets:
                self._type_elements(name, operands, target=target, number=number)
            return
        kinds = [kind for kind in map(self.types.of, operands) if kind is not ZERO]
        kind = self._combine(name, kinds, number=number) if operands else _EQUAL
        for target in targets:
            self.types.set(target, kind)

    def _combine(self, name: str, kinds: list[Type], *, number: Any = None) -> Type | None:
        """The type of a value that depends on values of these types."""
        if not kinds:
            return ZERO
        if len(kinds) == 1 and not kinds[0].differs and kinds[0].factor is None:
            return kinds[0]
        if name in _LINEAR and any(kind.partial or kind.factor is not None for kind in kinds):
            return self._linear(name, kinds, number=number)
        return join([*kinds])

    def _linear(self, name: str, kinds: list[Type], *, number: Any) -> Type | None:
        """The type of a sum, a product or a copy of partial sums or gradients."""
        first = max(kinds, key=lambda kind: (kind.factor is not None, kind.partial))
        if name in _PRODUCTS:
            others = [kind for kind in kinds if kind is not first]
            if any(kind.differs for kind in others):
                return join([*kinds])
            return self._scaled(first, name, number=number)
        if name in _ADDITIONS:
            for kind in kinds:
                if first.partial & ~kind.differs:
                    axis = self.axes.describe(first.partial & ~kind.differs)
                    self.fault(
                        f"values that are equal over {axis} are added to a partial sum of them, "
                        f"at {place()}"
                    )
                if kind.factor is not None and kind.factor != first.factor:
                    self.fault(
                        f"gradients with factors {first.factor:g} and {kind.factor:g} are added, "
                        f"at {place()}"
                    )
        return first

    def _scaled(self, kind: Type, name: str, *, number: Any) -> Type:
        """The type of a gradient after a product with a number."""
        if kind.factor is None or number is None:
            return kind
        factor = kind.factor * number if name.startswith("mul") else kind.factor / number
        return kind._replace(factor=factor)

    def _type_lists(self, values: Sequence[Any], written: list[Tensor]) -> None:
        """The types of an operator over lists: element by element."""
        lists = []
        common = []
        for value in values:
            if isinstance(value, (list, tuple)) and value and isinstance(value[0], Tensor):
                lists.append(value)
            elif isinstance(value, Tensor):
                common.append(value)
        number = next((item for item in values if isinstance(item, (int, float))), None)
        written_ids = {id(tensor) for tensor in written}
        is_in_place = any(id(item[0]) in written_ids for item in lists)
        for index in range(max(map(len, lists), default=0)):
            operands = [item[index] for item in lists if index < len(item)]
            targets = operands
            if not is_in_place:
                targets = written[index : index + 1]
            written_now = [item for item in targets if id(item) in written_ids]
            for target in written_now:
                self._type_elements("mul", [*operands, *common], target=target, number=number)

    def _type_elements(
        self, name: str, operands: Sequence[Tensor], *, target: Tensor, number: Any
    ) -> None:
        """The types of the result of an operator on elements, piece by piece."""
        pieces_of = [self._pieces_like(operand, target) for operand in operands]
        borders = {target.numel()}
        for pieces in pieces_of:
            borders |= {piece.first for piece in pieces}
        results = []
        for first, last in pairwise(sorted(borders)):
            kinds = []
            for pieces in pieces_of:
                kind = pieces[bisect_right(pieces, first, key=_last_element)].kind
                if kind is not ZERO:
                    kinds.append(kind)
            results.append(Piece(first, last, self._combine(name, kinds, number=number)))
        if results:
            self.types.write(target, results)

    def _pieces_like(self, operand: Tensor, target: Tensor) -> list[Piece]:
        """The pieces of an operand, one if it is broadcast to the size of the target."""
        if operand.numel() == target.numel():
            return self.types.pieces(operand)
        return [Piece(0, target.numel(), self.types.of(operand))]

    def _is_of_versions(self, args: Sequence[Any]) -> bool:
        """Whether a sum adds rows of gradients: one row per rank, with its addends."""
        is_of_rows = len(args) > 1 and list(args[1]) == [0] and args[0].is_contiguous()
        return is_of_rows and self._has_gradients(args[0])

    def _has_gradients(self, tensor: Tensor) -> bool:
        """Whether gradients that are being reduced are among the elements of a tensor."""
        kinds = [piece.kind for piece in self.types.pieces(tensor)]
        return any(kind is not ZERO and kind.factor is not None for kind in kinds)

    def _all_reduce(self, call: Call, tensors: _Tensors) -> None:
        """Every piece becomes its sum over the group."""
        (tensor,) = tensors.outputs
        reduced = []
        for piece in self.types.pieces(tensor):
            reduced.append(piece._replace(kind=self._reduced(piece.kind, call)))
        self.types.write(tensor, reduced)

    def _reduce_scatter(self, call: Call, tensors: _Tensors) -> None:
        """The output is this rank's shard of the sum; ranks of the group have other shards."""
        (tensor,) = tensors.inputs
        (output,) = tensors.outputs
        mask = self.axes.mask(call.ranks)
        start = call.ranks.index(self.rank) * output.numel()
        scattered = []
        for piece in self.types.pieces(tensor):
            reduced = self._reduced(piece.kind, call)
            if reduced is not None:
                reduced = reduced._replace(varying=reduced.varying | mask)
            first = max(piece.first - start, 0)
            last = min(piece.last - start, output.numel())
            if first < last:
                scattered.append(Piece(first, last, reduced))
        self.types.write(output, scattered)

    def _reduced(self, kind: Type | None, call: Call) -> Type | None:
        """The type of a sum over a group; a fault if its addends are equal or are shards."""
        if kind is ZERO:
            return ZERO
        mask = self.axes.mask(call.ranks)
        if kind.factor is not None and call.ranks == self.axes.end_ranks:
            mask = self.axes.ends
        cleared = kind._replace(varying=kind.varying & ~mask, partial=kind.partial & ~mask)
        if call.size.endswith((" max", " min")):
            if kind.factor is not None:
                what = f"extremes of the gradient of {kind.name} are taken"
                self._wrong_sum(what, call, mask=mask)
            return cleared
        is_mean = call.size.endswith(" avg")
        if kind.factor is not None:
            self.num_sums += 1
            if is_mean:
                cleared = cleared._replace(factor=kind.factor / len(call.ranks))
            if kind.varying & mask:
                self._wrong_sum(f"shards of the gradient of {kind.name} are added", call, mask=mask)
        equal = mask & ~kind.differs
        if equal and not is_mean:
            what = "values that are equal already are summed"
            if kind.factor is not None:
                what = f"the gradient of {kind.name}, summed already, is summed again"
            self._wrong_sum(what, call, mask=equal)
        return cleared

    def _wrong_sum(self, what: str, call: Call, *, mask: int) -> None:
        """Note the fault of a collective that adds the wrong values."""
        self.fault(f"{what} over {self.axes.describe(mask)}, by {call.op} at {call.place}")

    def _all_gather(self, call: Call, tensors: _Tensors) -> None:
        """All ranks of the group get the shards of all, so that the output is equal on them."""
        (tensor,) = tensors.inputs
        (output,) = tensors.outputs
        mask = self.axes.mask(call.ranks)
        known = {piece.kind for piece in self.types.pieces(output)} - {ZERO}
        if len(known) < 2:
            self._set_gathered(output, tensor, mask=mask)
            return
        # a flat buffer: the shards of other ranks are of other parameters
        index = call.ranks.index(self.rank)
        self.types.copy(tensor, output.view(-1)[index * tensor.numel() :][: tensor.numel()])
        gathered = []
        for piece in self.types.pieces(output):
            kind = piece.kind
            if kind is not ZERO:
                kind = kind._replace(varying=kind.varying & ~mask)
            gathered.append(piece._replace(kind=kind))
        self.types.write(output, gathered)

    def _set_gathered(self, output: Tensor, tensor: Tensor, *, mask: int) -> None:
        """Set the types of `output`: every rank's tensor in turn, with the pieces of `tensor`."""
        pieces = []
        for start in range(0, output.numel(), max(tensor.numel(), 1)):
            for first, last, kind in self.types.pieces(tensor):
                if kind is not ZERO:
                    kind = kind._replace(varying=kind.varying & ~mask, partial=kind.partial & ~mask)
                pieces.append(Piece(start + first, start + last, kind))
        if pieces:
            self.types.write(output, pieces)

    def _all_to_all(self, call: Call, tensors: _Tensors) -> None:
        """Every rank gets other values, unless each sends the same to all."""
        (tensor,) = tensors.inputs
        (output,) = tensors.outputs
        mask = self.axes.mask(call.ranks)
        kind = self.types.of(tensor)
        if self._has_gradients(tensor):
            self._exchange_versions(call, tensors)
        elif kind is ZERO:
            self.types.set(output, ZERO)
        elif self._sends_copies(call, tensor):
            # an all-gather of rows of uneven numbers
            self.types.set(output, Type(kind.differs & ~mask))
        else:
            self.types.set(output, Type(kind.differs | mask))

    def _sends_copies(self, call: Call, tensor: Tensor) -> bool:
        """Whether this rank sends the same values to every rank of the group."""
        sent = set(call.splits[0]) if call.splits else set()
        return self.types.num_copies(tensor) == len(call.ranks) and len(sent) < 2

    def _exchange_versions(self, call: Call, tensors: _Tensors) -> None:
        """An all-to-all of gradients: the first half of a reduce-scatter, whose sum follows."""
        (output,) = tensors.outputs
        rows = output.view(len(call.ranks), -1)
        for row in rows:
            self._reduce_scatter(call, _Tensors(tensors.inputs, [row]))

    def _send(self, call: Call, tensors: _Tensors) -> None:
        """A message in a ring: the received tensor has the type of the one that is sent.

        Messages between stages have the types of messages.py.
        """
        (tensor,) = tensors.inputs
        kind = self.types.of(tensor)
        waiting = self._received.get((call.ranks, tensor.numel()))
        if waiting and kind is not ZERO:
            self.types.set(waiting.pop(0), Type(kind.differs | self.axes.mask(call.ranks)))

    def _receive(self, call: Call, tensors: _Tensors) -> None:
        """A received tensor can differ on every rank, until the message that is sent types it."""
        (tensor,) = tensors.outputs
        if self.axes.mask(call.ranks) != self.axes.masks["pp"]:
            self._received.setdefault((call.ranks, tensor.numel()), []).append(tensor)
        self.types.set(tensor, Type(self.axes.world))


def _num_copies(name: str, args: Sequence[Any]) -> int:
    """The equal parts of a copy along its first dim: of an expanded tensor, or a repeated one."""
    if name == "repeat":
        times, *inner = args[1]
        is_alike = len(args[1]) == args[0].ndim and all(number == 1 for number in inner)
        return times if is_alike else 1
    is_expanded = args[0].ndim > 0 and args[0].stride(0) == 0
    return args[0].shape[0] if is_expanded else 1


def _last_element(piece: Piece) -> int:
    """The key by which pieces are ordered."""
    return piece.last
