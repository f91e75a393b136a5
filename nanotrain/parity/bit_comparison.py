"""The comparison of `nanotrain parity --invariant`: the results of a layout, bit by bit.

    Step              what one rank has computed in a step
    compare_steps     the first tensor of one rank that the layout lacks, or has with other bits

Hidden states are compared by sample and position: a rank has its samples, with cp and sequence
parallelism some of their positions, and with pipelines some layers. The ranks together must have
every sample, position and element that one rank has, and no others.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from nanotrain.quantities import count_of
from nanotrain.spec.boxes import TensorBox

INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element
NOT_RECORDED = "one rank has not recorded it"


class Hidden(NamedTuple):
    """Hidden states of one microbatch on one rank, or their gradient."""

    samples: Tensor  # [B] int64
    positions: Tensor  # [S'] int64, in the full sequence
    values: Tensor  # [B, S', H]


HiddenByName = dict[str, list[Hidden]]
Boxes = dict[TensorBox, Tensor]


@dataclass
class Step:
    """The results of one rank in a step.

    Attributes:
        layers: names of layers of this rank; the output of each has to be in `forward`.
        forward, backward: hidden states after parts of layers and their gradients, by name, in
            the order in which they were computed. A name that is in `forward` alone has no
            gradient; one in `backward` has to have that of every sample.
        grads, weights: its shards of the reduced gradients, and of the updated weights.
    """

    loss: float = 0.0
    grad_norm: float = 0.0
    layers: Sequence[str] = ()
    forward: HiddenByName = field(default_factory=dict)
    backward: HiddenByName = field(default_factory=dict)
    grads: Boxes = field(default_factory=dict)
    weights: Boxes = field(default_factory=dict)


class BitComparison(NamedTuple):
    """The comparison of the steps of one rank with those of a layout."""

    num_tensors: int  # that were compared, up to the first difference
    num_left_out: int  # gradients of outputs that one rank does not compute
    difference: str  # the first difference in words; empty if all bits are equal


def compare_steps(reference: Sequence[Step], records: Sequence[Sequence[Step]]) -> BitComparison:
    """Compare the steps of one rank with those of a layout, up to the first difference.

    Args:
        reference: steps of one rank.
        records: steps of the layout, by rank.
    """
    num_tensors = 0
    num_left_out = 0
    for number, step in enumerate(reference, start=1):
        num_left_out += len(step.forward.keys() - step.backward.keys())
        for comparison in _comparisons(step, [steps[number - 1] for steps in records]):
            num_tensors += 1
            if comparison.difference:
                difference = f"step {number}, {comparison.name}: {comparison.difference}"
                return BitComparison(num_tensors, num_left_out, difference)
    return BitComparison(num_tensors, num_left_out, "")


class Comparison(NamedTuple):
    """The comparison of a tensor of one rank with the tensors of the layout."""

    name: str
    difference: str  # empty if the bits are equal


def _comparisons(step: Step, others: Sequence[Step]) -> Iterator[Comparison]:
    """Compare the tensors of a step, in the order in which they are computed."""
    outputs = [other.forward for other in others]
    yield from _missing_layers(step)
    yield from _hidden_comparisons("output of", step.forward, by_rank=outputs)
    yield Comparison("loss", _number_difference(step.loss, [other.loss for other in others]))
    yield from _missing_gradients(step)
    gradients = [other.backward for other in others]
    backward = dict(reversed(step.backward.items()))
    yield from _hidden_comparisons("gradient of the output of", backward, by_rank=gradients)
    yield from _box_comparisons("gradient", step.grads, by_rank=[other.grads for other in others])
    norms = [other.grad_norm for other in others]
    yield Comparison("gradient norm", _number_difference(step.grad_norm, norms))
    weights = [other.weights for other in others]
    yield from _box_comparisons("updated", step.weights, by_rank=weights)


def _missing_layers(step: Step) -> Iterator[Comparison]:
    """The layers of one rank without a recorded output."""
    for layer in step.layers:
        if layer not in step.forward:
            yield Comparison(f"output of {layer}", NOT_RECORDED)


def _missing_gradients(step: Step) -> Iterator[Comparison]:
    """The outputs of one rank without the gradients of all samples."""
    for name, hidden in step.backward.items():
        if _by_sample(hidden).keys() != _by_sample(step.forward[name]).keys():
            yield Comparison(f"gradient of the output of {name}", NOT_RECORDED)


def _hidden_comparisons(
    what: str, expected: HiddenByName, *, by_rank: Sequence[HiddenByName]
) -> Iterator[Comparison]:
    """Compare hidden states or their gradients, name by name."""
    for name, hidden in expected.items():
        held = [by_name.get(name, []) for by_name in by_rank]
        yield Comparison(f"{what} {name}", _hidden_difference(hidden, held))
    for rank, by_name in enumerate(by_rank):
        for name in by_name:
            if name not in expected:
                yield Comparison(f"{what} {name}", f"rank {rank} has it, one rank has not")


def _by_sample(hidden: Sequence[Hidden]) -> dict[int, Tensor]:
    """The hidden states [S, H] of every sample."""
    states: dict[int, Tensor] = {}
    for samples, _, values in hidden:
        states |= dict(zip(samples.tolist(), values, strict=True))
    return states


def _hidden_difference(hidden: Sequence[Hidden], by_rank: Sequence[Sequence[Hidden]]) -> str:
    """The first place, in words, where the layout has other hidden states; empty if none."""
    expected = _by_sample(hidden)
    is_missing: dict[int, Tensor] = {}  # [S] bool, the positions that no rank has
    for sample, states in expected.items():
        is_missing[sample] = torch.ones(len(states), dtype=torch.bool)
    for rank, held in enumerate(by_rank):
        for samples, positions, values in held:
            for sample, states in zip(samples.tolist(), values, strict=True):
                if sample not in expected:
                    return f"rank {rank} has sample {sample}, one rank has not"
                is_missing[sample][positions] = False
                difference = _difference(states, expected[sample][positions])
                if difference:
                    position = int(positions[difference.first[0]])
                    return (
                        f"{difference.number} on rank {rank}, first {difference.values} at sample "
                        f"{sample}, position {position}, channel {difference.first[1]}"
                    )
    for sample, is_missing_at in is_missing.items():
        if bool(is_missing_at.any()):
            num_missing = count_of(int(is_missing_at.sum()), "position")
            first = int(is_missing_at.nonzero()[0])
            return f"no rank has {num_missing} of sample {sample}, first position {first}"
    return ""


def _number_difference(expected: float, by_rank: Sequence[float]) -> str:
    """The first rank with another number, in words; empty if none."""
    for rank, number in enumerate(by_rank):
        if number != expected:
            return f"{number!r} on rank {rank} beside {expected!r}"
    return ""


def _box_comparisons(
    what: str, expected: Boxes, *, by_rank: Sequence[Boxes]
) -> Iterator[Comparison]:
    """Compare gradients or weights, tensor by tensor."""
    full: dict[str, Tensor] = {}
    is_missing: dict[str, Tensor] = {}  # bool, the elements that no rank has
    for box, tensor in expected.items():
        total = full.setdefault(box.name, tensor.new_zeros(box.shape))
        total[box.box.slices()] = tensor
        is_missing[box.name] = torch.ones(box.shape, dtype=torch.bool)
    differences = dict.fromkeys(full, "")
    for rank, boxes in enumerate(by_rank):
        for box, tensor in boxes.items():
            if box.name not in full:
                differences[box.name] = f"rank {rank} has it, one rank has not"
                continue
            is_missing[box.name][box.box.slices()] = False
            difference = _difference(tensor, full[box.name][box.box.slices()])
            if difference and not differences[box.name]:
                text = f"{difference.number} on rank {rank}, first {difference.values}"
                differences[box.name] = text
    for name, is_missing_at in is_missing.items():
        if not differences[name] and bool(is_missing_at.any()):
            num_missing = count_of(int(is_missing_at.sum()), "element")
            differences[name] = f"no rank has {num_missing}"
    for name, difference_text in differences.items():
        yield Comparison(f"{what} {name}", difference_text)


class _Difference(NamedTuple):
    """The elements of a tensor that have other bits."""

    number: str  # their number, in words
    values: str  # both values of the first such element, in words
    first: tuple[int, ...]  # the index of that element


def _difference(tensor: Tensor, expected: Tensor) -> _Difference | None:
    """The elements of two tensors whose bits differ, as of 0.0 and -0.0; None if all are equal."""
    dtype = INTEGERS[tensor.itemsize]
    differs = tensor.contiguous().view(dtype) != expected.contiguous().view(dtype)
    if not bool(differs.any()):
        return None
    first = tuple(differs.nonzero()[0].tolist())
    number = f"{int(differs.sum()):,} of {differs.numel():,} elements differ"
    values = f"{tensor[first].item()!r} beside {expected[first].item()!r}"
    return _Difference(number, values, first)
