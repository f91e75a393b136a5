"""`TypedRecorder`: gives every tensor of a rank on the meta device its type.

Torch's operators see a type per input. Equal inputs give equal results. A result that depends on
varying values varies, however it is computed, and a partial sum stays one under operators that are
linear. Collectives are the only way back: a sum over an axis makes partial or varying values equal.
Sums of values that are equal already, and sums over shards of a gradient, are faults.
"""

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
from nanotrain.prove.types import ZERO, Segment, Type, TypeMap, extent_of, join

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
_ADDITIONS = {"add", "add_", "cat", "stack", "sub", "sub_"}
_PRODUCTS = {"mul", "mul_", "div", "div_", "neg", "neg_"}
_COPIES = {"_to_copy", "clone", "copy", "copy_", "sum", "contiguous"}
_LINEAR = _ADDITIONS | _PRODUCTS | _COPIES
_ELEMENTWISE = _LINEAR - {"cat", "stack", "sum"}


class _Tensors(NamedTuple):
    """The tensors of a collective."""

    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]


class _Traits(NamedTuple):
    """What the type of a result needs to know of an operator."""

    name: str
    has_out: bool  # whether it writes to an argument `out`
    is_random: bool  # whether it draws random numbers; attention does with dropout only


@cache
def _traits(func: Any) -> _Traits:
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
        hidden_axes: axes along which hidden states between pipeline stages vary.
        shapes: as for `Recorder`.

    Attributes:
        types: types of all tensors.
        faults: descriptions of what is wrong, without repetitions.
        num_sums: sums of gradients that were checked.
        num_operators: operators whose results have a type.
    """

    def __init__(
        self, axes: Axes, rank: int, *, hidden_axes: int, shapes: dict[Any, Any] | None = None
    ) -> None:
        super().__init__(shapes)
        self.axes = axes
        self.rank = rank
        self._hidden_axes = hidden_axes
        self._stages = axes.masks["pp"]
        self.types = TypeMap()
        self.faults: dict[str, None] = {}
        self.num_sums = 0
        # messages that are received before the rank has sent its own, by ranks of their group
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
        """The types of what an operator returns or writes."""
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
                self._copy(source, target)
        elif name.startswith(("_foreach", "_fused")):
            self._type_lists([*args, *kwargs.values()], targets)
        elif targets:
            self._type_tensors(name, args, operands=operands, targets=targets)

    def _type_tensors(
        self, name: str, args: Sequence[Any], *, operands: list[Tensor], targets: list[Tensor]
    ) -> None:
        """The types of what an operator on tensors returns or writes."""
        if name == "copy_":
            self._copy(args[1], targets[0])
        elif name in ("clone", "_to_copy"):
            self._copy(args[0], targets[0])
        elif name == "sum" and self._is_of_versions(args):
            self._copy(args[0][0], targets[0])
        elif name == "cat" and self._is_in_order(args, targets[0]):
            self._concatenate(args[0], targets[0])
        else:
            number = next((item for item in args if isinstance(item, (int, float))), None)
            self._type_values(name, operands, targets=targets, number=number)

    def _type_values(
        self, name: str, operands: Sequence[Tensor], *, targets: Sequence[Tensor], number: Any
    ) -> None:
        """The types of results that depend on all operands."""
        if name in _ELEMENTWISE and any(map(self.types.is_mixed, operands)):
            for target, segments in zip(
                targets,
                self._elementwise(name, operands, targets=targets, number=number),
                strict=True,
            ):
                self.types.write(target, segments)
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
            kinds = self._elementwise(
                "mul", [*operands, *common], targets=written_now, number=number
            )
            for target, segments in zip(written_now, kinds, strict=True):
                self.types.write(target, segments)

    def _elementwise(
        self, name: str, operands: Sequence[Tensor], *, targets: Sequence[Tensor], number: Any
    ) -> list[list[Segment]]:
        """The types of each target of an operator on elements, range by range."""
        results = []
        for target in targets:
            borders = self._borders(operands, target)
            segments = []
            for low, high in pairwise(borders):
                kinds = [self._kind_at(item, low=low, high=high, like=target) for item in operands]
                start = extent_of(target).start
                kind = self._combine(name, [item for item in kinds if item], number=number)
                segments.append((start + low, start + high, kind))
            results.append(segments)
        return results

    def _borders(self, operands: Sequence[Tensor], target: Tensor) -> list[int]:
        """Where the types of operands of the size of the target change, in its bytes from 0 on."""
        borders = {0, target.nbytes}
        for operand in operands:
            if self._is_alike(operand, target):
                start = extent_of(operand).start
                for first, last, _ in self.types.segments(operand):
                    for byte in (first, last):
                        borders.add((byte - start) * target.itemsize // operand.itemsize)
        return sorted(borders)

    def _kind_at(self, tensor: Tensor, *, low: int, high: int, like: Tensor) -> Type | None:
        """The type of the elements of a tensor at bytes [low, high) of another one."""
        if not self._is_alike(tensor, like):
            return self.types.of(tensor)
        flat = tensor.view(-1)[low // like.itemsize : high // like.itemsize]
        return self.types.of(flat)

    def _copy(self, source: Tensor, target: Tensor) -> None:
        """A copy has the types of its source, range by range where both are dense."""
        if not self.types.is_mixed(source):
            self.types.set(target, self.types.of(source))
            return
        segments = self.types.segments(source)
        if len({kind for _, _, kind in segments}) < 2 or not self._is_alike(source, target):
            self.types.set(target, self.types.of(source))
            return
        start = extent_of(source).start
        self._write_from(target, segments, start=start, itemsize=source.itemsize)

    def _is_alike(self, source: Tensor, target: Tensor) -> bool:
        """Whether two tensors have the same number of elements, in order of memory."""
        is_contiguous = source.is_contiguous() and target.is_contiguous()
        return is_contiguous and source.numel() == target.numel()

    def _is_in_order(self, args: Sequence[Any], target: Tensor) -> bool:
        """Whether a concatenation puts tensors after each other in memory."""
        return (len(args) < 2 or args[1] == 0) and target.is_contiguous()

    def _is_of_versions(self, args: Sequence[Any]) -> bool:
        """Whether rows are added, each the version that one rank has of the same gradients."""
        is_of_rows = len(args) > 1 and list(args[1]) == [0] and args[0].is_contiguous()
        kinds = [kind for _, _, kind in self.types.segments(args[0])]
        return is_of_rows and any(kind is not ZERO and kind.factor is not None for kind in kinds)

    def _concatenate(self, sources: Sequence[Tensor], target: Tensor) -> None:
        """Tensors after each other in memory, each with its types."""
        first = 0
        for source in sources:
            if source.numel():
                flat = target.view(-1)[first : first + source.numel()]
                self._copy(source, flat)
                first += source.numel()

    def _write_from(
        self, target: Tensor, segments: Sequence[Segment], *, start: int, itemsize: int
    ) -> None:
        """Give a dense tensor the types of the bytes of another one from `start` on."""
        first = extent_of(target).start
        moved = []
        for segment in segments:
            begin = first + (segment[0] - start) * target.itemsize // itemsize
            end = first + (segment[1] - start) * target.itemsize // itemsize
            moved.append((begin, end, segment[2]))
        if moved:
            self.types.write(target, moved)

    def _all_reduce(self, call: Call, tensors: _Tensors) -> None:
        (tensor,) = tensors.outputs
        reduced = []
        for start, stop, kind in self.types.segments(tensor):
            reduced.append((start, stop, self._reduced(kind, call)))
        if reduced:
            self.types.write(tensor, reduced)

    def _reduce_scatter(self, call: Call, tensors: _Tensors) -> None:
        (tensor,) = tensors.inputs
        (output,) = tensors.outputs
        mask = self.axes.mask(call.ranks)
        index = call.ranks.index(self.rank)
        start = extent_of(tensor).start + index * output.nbytes
        stop = start + output.nbytes
        scattered = []
        for first, last, kind in self.types.segments(tensor):
            reduced = self._reduced(kind, call)
            if reduced is not None:
                reduced = reduced._replace(varying=reduced.varying | mask)
            if max(first, start) < min(last, stop):
                scattered.append((max(first, start), min(last, stop), reduced))
        self._write_from(output, scattered, start=start, itemsize=tensor.itemsize)

    def _reduced(self, kind: Type | None, call: Call) -> Type | None:
        """The type of a sum over a group; checks that the sum is one of different values."""
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
        self.fault(f"{what} over {self.axes.describe(mask)}, by {call.op} at {call.place}")

    def _all_gather(self, call: Call, tensors: _Tensors) -> None:
        (tensor,) = tensors.inputs
        (output,) = tensors.outputs
        mask = self.axes.mask(call.ranks)
        kind = self.types.of(tensor)
        known = self.types.segments(output)
        if kind is not ZERO:
            kind = kind._replace(varying=kind.varying & ~mask, partial=kind.partial & ~mask)
        if len(known) < 2:  # not a flat buffer of several parameters
            self.types.set(output, kind)
            return
        index = call.ranks.index(self.rank)
        self._copy(tensor, output.view(-1)[index * tensor.numel() :][: tensor.numel()])
        gathered = []
        for start, stop, old in self.types.segments(output):
            if old is not None:
                old = old._replace(varying=old.varying & ~mask)
            gathered.append((start, stop, old))
        self.types.write(output, gathered)

    def _all_to_all(self, call: Call, tensors: _Tensors) -> None:
        (tensor,) = tensors.inputs
        kinds = [kind for _, _, kind in self.types.segments(tensor)]
        if any(kind is not ZERO and kind.factor is not None for kind in kinds):
            self._exchange_versions(call, tensors)
            return
        kind = self.types.of(tensor)
        if kind is not ZERO:
            kind = Type(kind.differs | self.axes.mask(call.ranks))
        self.types.set(tensors.outputs[0], kind)

    def _exchange_versions(self, call: Call, tensors: _Tensors) -> None:
        """An all-to-all of gradients: the first half of a reduce-scatter, whose sum follows."""
        (output,) = tensors.outputs
        rows = output.view(len(call.ranks), -1)
        for row in rows:
            self._reduce_scatter(call, _Tensors(tensors.inputs, [row]))

    def _send(self, call: Call, tensors: _Tensors) -> None:
        """A message to another rank; the same ranks of other groups send theirs.

        Between stages its type must be the one that the receiver assumes. In a ring, what this rank
        has received has the type of what it sends.
        """
        (tensor,) = tensors.inputs
        mask = self.axes.mask(call.ranks)
        kind = self.types.of(tensor)
        if kind is ZERO:
            return
        if mask == self._stages:
            wrong = kind.differs & ~mask & ~self._hidden_axes
            if wrong:
                axis = self.axes.describe(wrong)
                self.fault(
                    f"a stage sends hidden states or gradients that vary over {axis}, where they "
                    f"should be equal, at {call.place}"
                )
            return
        waiting = self._received.get((call.ranks, tensor.numel()))
        if waiting:
            self.types.set(waiting.pop(0), Type(kind.differs | mask))

    def _receive(self, call: Call, tensors: _Tensors) -> None:
        (tensor,) = tensors.outputs
        mask = self.axes.mask(call.ranks)
        if mask != self._stages:
            self._received.setdefault((call.ranks, tensor.numel()), []).append(tensor)
        self.types.set(tensor, Type(self._hidden_axes | mask))
