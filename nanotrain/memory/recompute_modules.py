"""`recompute_modules`: recomputation of functions of a block, by module (recomputed_pairs.py)."""

from collections.abc import Collection
from functools import partial
from operator import attrgetter
from typing import Any

from torch import Tensor, nn

from nanotrain.memory.recompute import Recompute, TensorFunction
from nanotrain.memory.recomputed_pairs import CHECKPOINTED, Pair, discarded_pairs


def recompute_modules(
    block: nn.Module,
    modules: Collection[str],
    *,
    recompute: Recompute,
    traces_attention: bool = True,
) -> None:
    """Replace functions of a block in place.

    No module gets a second name, under which it would be saved twice.

    Args:
        block: a transformer block.
        modules: names of the modules.
        recompute: recomputation of the stage.
        traces_attention: whether a compiled block has core attention in its graph.
    """
    second_block = getattr(block, "second", None)  # only a `ShortcutBlock` has one
    if isinstance(second_block, nn.Module):
        recompute_modules(
            second_block, modules, recompute=recompute, traces_attention=traces_attention
        )
    other_mlp = "mlp" if _has(block, "mlp.experts") else "moe"
    for name, paths in CHECKPOINTED.items():
        if name in modules and name != other_mlp:
            for path in paths:
                _checkpoint(block, path, recompute=recompute)
    for pair in discarded_pairs(modules):
        is_core = pair.second.endswith("core_attention")
        in_graphs = pair.is_traceable and (traces_attention or not is_core)
        _discard_outputs(block, pair, recompute=recompute, in_graphs=in_graphs)


def _checkpoint(block: nn.Module, path: str, *, recompute: Recompute) -> None:
    """Checkpoint one function of a block, if present: only inputs and output are kept."""
    if _has(block, path):
        _set(block, path, function=recompute.checkpointed(attrgetter(path)(block)))


def _discard_outputs(
    block: nn.Module, pair: Pair, *, recompute: Recompute, in_graphs: bool
) -> None:
    """Chain two functions of a block, if present, so that outputs of the first are discarded."""
    first = _function_path(block, pair.first)
    if not _has(block, first) or (pair.requires and not _is_local(block, pair.requires)):
        return
    run_first, run_second = recompute.discarding(
        attrgetter(first)(block),
        second=attrgetter(pair.second)(block),
        in_graphs=in_graphs and _is_traced(block, pair.second),
    )
    _set(block, first, function=run_first)
    _set(block, pair.second, function=run_second)


def unchanged(x: Tensor) -> Tensor:
    """The function of a module whose readers compute it themselves; nothing is discarded then."""
    return x


def _has(block: nn.Module, path: str) -> bool:
    """Whether a block is of a kind with this function, and the function is not the identity."""
    owner: Any = block
    *owners, function = path.split(".")
    for name in owners:
        owner = getattr(owner, name, None)
    if isinstance(owner, nn.Identity):
        return False
    return getattr(owner, function, unchanged) is not unchanged


def _function_path(block: nn.Module, path: str) -> str:
    """The path of a function, which of a module is `forward`."""
    if _has(block, path) and isinstance(attrgetter(path)(block), nn.Module):
        return f"{path}.forward"
    return path


def _is_local(block: nn.Module, path: str) -> bool:
    """Whether a block has this module, and the module communicates nothing."""
    module = attrgetter(path)(block)
    is_present = isinstance(module, nn.Module) and not isinstance(module, nn.Identity)
    return is_present and not getattr(module, "communicates", False)


def _is_traced(block: nn.Module, path: str) -> bool:
    """Whether a compiled block has a function and its linear layers in its graphs."""
    functions = [attrgetter(path)(block)]
    for module in _owner(block, path).modules():
        if hasattr(module, "compute"):
            functions.append(module.compute)
    return all(map(_is_in_graphs, functions))


def _is_in_graphs(function: TensorFunction) -> bool:
    """Whether a compiled graph may contain a function; False for functions of `eager`."""
    called = function.func if isinstance(function, partial) else function
    return bool(getattr(called, "is_traced", True))


def _set(block: nn.Module, path: str, *, function: TensorFunction) -> None:
    _, _, name = path.rpartition(".")
    setattr(_owner(block, path), name, function)


def _owner(block: nn.Module, path: str) -> Any:
    """The module of a block that has a function: the block itself where the path is a name."""
    owner, _, _ = path.rpartition(".")
    return attrgetter(owner)(block) if owner else block
