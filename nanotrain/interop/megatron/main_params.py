"""Check that main parameters are those of the weights, from their first and last rows.

It finds parameters that are looked up at wrong places, and those that were saved so: megatron-core
0.16.1 leaves out the padding between its buckets when it saves --dist-ckpt-optim-fully-reshardable,
which shifts the state behind it.
"""

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from nanotrain.interop.imported import StateError
from nanotrain.interop.megatron.buckets import MAIN
from nanotrain.interop.megatron.optimizer_state import State
from nanotrain.interop.megatron.placement import Placement
from nanotrain.spec.boxes import Box

ROUNDING = 0.1  # of a weight, and of the largest one in its row; 8 bits are coarser than 16
SMALLEST = 1e-6  # below it 16 bits are zero


def require_main_of_weights(placement: Placement, state: State) -> None:
    """Check the first and the last row of every parameter.

    Args:
        placement: the tensors of a checkpoint.
        state: the state of its optimizer.

    Raises:
        StateError: a main parameter does not round to its weight.
    """
    read_main = partial(state.read, kind=MAIN)
    for name, size in placement.sizes.items():
        if not name.startswith("model/"):
            continue
        for box in end_rows(size):
            weight = placement.read(name, box).float()
            main = placement.read(name, box, read=read_main).float()
            if not is_rounded(main, weight):
                raise other_main_params(placement, name, box=box)


def other_main_params(placement: Placement, name: str, *, box: Box) -> StateError:
    """The error for main parameters that differ from a box of a weight."""
    return StateError(
        f"the main parameters in {placement.folder.folder} are not those of its weights",
        why=f"{name.removeprefix('model/')}[{box.text}] differs; megatron-core 0.16.1 saves "
        "--dist-ckpt-optim-fully-reshardable so where buckets end in padding",
        fix="save it without that flag",
    )


def end_rows(size: Sequence[int]) -> Iterator[Box]:
    """The first and the last row; of one dim, all elements.

    >>> [box.text for box in end_rows((2, 3, 4))]
    ['0:1,0:1,0:4', '1:2,2:3,0:4']
    """
    lead = size[:-1]
    zeros = [0] * len(lead)
    ones = [1] * len(lead)
    yield Box((*zeros, 0), (*ones, size[-1]))
    if lead:
        last = [length - 1 for length in lead]
        yield Box((*last, 0), (*lead, size[-1]))


def is_rounded(main: Tensor, weight: Tensor) -> bool:
    """Whether weights can be main parameters in fewer bits; a value that is no number is one."""
    largest = weight.abs().nan_to_num(0.0, posinf=0.0).max().item()
    atol = SMALLEST + ROUNDING * largest
    return torch.allclose(main, weight, rtol=ROUNDING, atol=atol, equal_nan=True)
