"""Static copies of the inputs of CUDA graphs besides hidden states.

ContextBuffers   copies of the tensors of a context, for one microbatch
StageWords       the random words that layers of a stage read besides their arguments
map_tensors      a structure with its tensors replaced
tensors_in       the tensors of a structure; `differentiable` are those with a backward
describe         what has to stay as it was captured
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from nanotrain.kernels.fp8.layer import Fp8Layer
from nanotrain.kernels.fp8.rounding import RoundingWords

# how a structure of tensors is walked: the path and the tensor -> what replaces it
TensorMap = Callable[[str, Tensor], Any]


@dataclass
class _Copied:
    """A static tensor, its source, and the version of the source that it has."""

    static: Tensor
    source: Tensor  # kept, so that no other tensor gets its memory
    version: int


class ContextBuffers:
    """Static copies of the tensors of a context, for the parts of one microbatch.

    Attributes:
        num_in_flight: parts between forward and backward that read them.
    """

    def __init__(self) -> None:
        self.num_in_flight = 0
        self._copies: dict[Any, _Copied] = {}

    def load(self, path: str, tensor: Tensor) -> Tensor:
        """The static copy of a tensor, copied unless it holds this tensor already."""
        key = (path, tensor.shape, tensor.dtype)
        copied = self._copies.get(key)
        if copied is None:
            copied = _Copied(tensor.clone(), tensor, tensor._version)
            self._copies[key] = copied
        elif not _is_same(copied, tensor):
            assert self.num_in_flight == 0, "a graph in flight still reads another microbatch"
            copied.static.copy_(tensor)
            copied.source = tensor
            copied.version = tensor._version
        return copied.static


def _is_same(copied: _Copied, tensor: Tensor) -> bool:
    """Whether a tensor is the memory that was copied, unchanged."""
    is_same_memory = copied.source.data_ptr() == tensor.data_ptr()
    is_same_layout = copied.source.stride() == tensor.stride()
    return is_same_memory and is_same_layout and copied.version == tensor._version


class StageWords:
    """The random words of stochastic rounding of a stage; layers of a stage share one object.

    Args:
        blocks: blocks of the stage, with or without layers that round so.
    """

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        self._words: RoundingWords | None = None
        for block in blocks:
            for module in block.modules():
                if isinstance(module, Fp8Layer) and module.options.recipe.is_two_level:
                    self._words = module.options.rounding

    @property
    def tokens(self) -> Tensor | None:
        """The words of the tokens of the microbatch that the stage computes."""
        return None if self._words is None else self._words.tokens

    @contextmanager
    def reading(self, tokens: Tensor | None) -> Iterator[None]:
        """Let layers read static words inside of the block."""
        words = self._words
        if words is None:
            yield
            return
        current = words.tokens
        words.tokens = tokens
        try:
            yield
        finally:
            words.tokens = current


class NotCapturable(Exception):
    """An input that is neither a tensor nor a plain value."""


def map_tensors(
    value: Any,
    function: TensorMap,
    *,
    path: str = "",
    constant: Callable[[Any], Any] = lambda value: value,
) -> Any:
    """A structure of dataclasses and tuples with its tensors replaced.

    Args:
        value: the structure.
        function: the path of a tensor and the tensor -> what replaces it.
        path: path of the structure.
        constant: a value that is no tensor -> what replaces it.
    """
    walk = partial(map_tensors, function=function, constant=constant)
    if isinstance(value, Tensor):
        return function(path, value)
    if is_dataclass(value) and not isinstance(value, type):
        mapped = {}
        for field in fields(value):
            item = getattr(value, field.name)
            mapped[field.name] = walk(item, path=f"{path}.{field.name}")
        return replace(value, **mapped)
    if isinstance(value, tuple):
        return tuple(walk(item, path=f"{path}.{index}") for index, item in enumerate(value))
    return constant(value)


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors of a structure, in order."""
    tensors: list[Tensor] = []
    map_tensors(value, lambda _, tensor: tensors.append(tensor))
    return tensors


def differentiable(value: Any) -> list[Tensor]:
    """The tensors of a structure that have a backward."""
    return [tensor for tensor in tensors_in(value) if tensor.grad_fn is not None]


def describe(context: Any) -> Any:
    """The properties of inputs that a capture fixes: plain values, shapes and dtypes of tensors.

    Raises:
        NotCapturable: another value.
    """
    return map_tensors(
        context, lambda _, tensor: (tensor.shape, tensor.dtype), constant=_plain_value
    )


def _plain_value(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str | dict):
        return value
    raise NotCapturable(f"a {type(value).__name__} is made for every microbatch")
