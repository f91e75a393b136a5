"""Parameters of a stage: declared, created without storage, and initialized.

    Parameters   the declared parameters of a module and its submodules, by relative name
    initialize   initial values, a function of (seed, name, global shape) and an element's index

A matrix is generated in blocks of rows, each from its own generator. A rank generates only the
blocks that overlap its box, so every topology gets the same bits.
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from nanotrain.precision.dtypes import TORCH_DTYPES
from nanotrain.spec.boxes import Box
from nanotrain.spec.params import Constant, LocalParam, Normal, ParamSpec, Uniform

# Elements per block. Another number gives other weights for the same seed.
BLOCK_ELEMENTS = 2**20


class Parameters(dict[str, nn.Parameter]):
    """Declared parameters by name relative to a module ("attention.query.weight")."""

    @classmethod
    def on_meta(cls, params: Sequence[LocalParam]) -> "Parameters":
        """The local shard of each parameter, without storage."""
        declared = cls()
        for param in params:
            dtype = TORCH_DTYPES[param.spec.dtype]
            empty = torch.empty(param.box.shape, dtype=dtype, device="meta")
            declared[param.spec.name] = nn.Parameter(empty, requires_grad=param.spec.is_trainable)
        return declared

    def linear(self, name: str) -> tuple[nn.Parameter, nn.Parameter | None]:
        """Weight and bias of a linear layer; no bias where none is declared."""
        return self[f"{name}.weight"], self.get(f"{name}.bias")

    def submodule(self, name: str) -> "Parameters":
        """The parameters of a submodule, by names without its prefix; empty if it has none."""
        prefix = f"{name}."
        return Parameters(
            {key.removeprefix(prefix): p for key, p in self.items() if key.startswith(prefix)}
        )


def initialize(stage: nn.Module, params: Iterable[LocalParam], *, seed: int) -> None:
    """Initialize the parameters of a stage in place.

    Args:
        stage: its parameters have storage (they may be views of a flat buffer).
        params: the parameters to initialize, any subset of the stage's.
        seed: seed of the run.
    """
    for local in params:
        spec = local.spec
        target = stage.get_parameter(spec.name).data
        if isinstance(spec.init, Constant):
            target.fill_(spec.init.value)
        else:
            fill_random(target, spec, box=local.box, seed=seed, init=spec.init)


# by the names of `Uniform.function`
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "": lambda x: x,
    "log": torch.log,
    "inverse_softplus_of_exp": lambda x: x.exp().expm1().log(),
}


def fill_random(
    target: Tensor, spec: ParamSpec, *, box: Box, seed: int, init: Normal | Uniform
) -> None:
    """Fill a box of a parameter with random initial values.

    Args:
        target: tensor of the box's shape, any dtype or device; filled in place.
        spec: the global parameter.
        box: the box of `target` in it.
        seed: seed of the run.
        init: distribution.
    """
    num_rows = spec.shape[0]
    row_shape = spec.shape[1:]
    row_elements = max(1, math.prod(row_shape))
    block_rows = max(1, BLOCK_ELEMENTS // row_elements)
    first = box.start[0]
    last = box.stop[0]
    columns = [slice(*bounds) for bounds in zip(box.start[1:], box.stop[1:], strict=True)]
    first_block = first - first % block_rows
    for start in range(first_block, last, block_rows):
        stop = min(start + block_rows, num_rows)
        block_seed = _block_seed(seed, spec, start_row=start)
        generator = torch.Generator()
        generator.manual_seed(block_seed)
        empty = torch.empty((stop - start, *row_shape))
        block = _draw(empty, init, generator=generator)
        low = max(start, first)
        high = min(stop, last)
        rows = slice(low - start, high - start)
        target[low - first : high - first].copy_(block[(rows, *columns)])


def _draw(block: Tensor, init: Normal | Uniform, *, generator: torch.Generator) -> Tensor:
    """Fill a block from a distribution."""
    if isinstance(init, Normal):
        return block.normal_(0.0, init.std, generator=generator)
    drawn = block.uniform_(init.low, init.high, generator=generator)
    return FUNCTIONS[init.function](drawn)


def _block_seed(seed: int, spec: ParamSpec, *, start_row: int) -> int:
    """The seed of a block of rows of a parameter, the same in every layout."""
    shape = "x".join(map(str, spec.shape))
    identity = f"{seed}/{spec.name}/{shape}/{start_row}"
    digest = hashlib.blake2b(identity.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
