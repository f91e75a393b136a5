"""FSDP units: modules that run one after another, each with the buckets that hold its parameters.

child_units    the children of a pipeline stage
given_units    modules named by the caller, of any model
traced_units   the units whose compiled graphs write weight gradients
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from nanotrain.parallel.dp.layout import BufferLayout
from nanotrain.parallel.dp.stores import ParamStore


@dataclass(frozen=True)
class UnitModule:
    """A module and what it reads."""

    module: nn.Module
    buckets: tuple[int, ...]  # indices of the buckets that it reads
    num_complete: int  # when its backward begins, the gradients of the first `num_complete` buckets are complete


def child_units(module: nn.Module, layout: BufferLayout) -> list[UnitModule]:
    """The children of a stage, which run in registration order."""
    # A module without parameters (the head of a tied model) reads the parameters that units share.
    shared = [i for i, bucket in enumerate(layout.buckets) if bucket.is_shared]
    units = []
    for name, child in unit_modules(module):
        own = [local.spec for local in layout.params if local.spec.name.startswith(f"{name}.")]
        if own and all(spec.is_last_stage_replica for spec in own):
            continue  # only the head and multi-token prediction read it
        names = {spec.unit for spec in own}
        indices = [i for i, bucket in enumerate(layout.buckets) if bucket.units & names]
        first = indices[0] if own else 0
        if not own or getattr(child, "reads_shared", False):
            indices += shared
        if indices:
            units.append(UnitModule(child, tuple(indices), first))
    return units


def given_units(units: Sequence[tuple[nn.Module, Collection[str]]], layout: BufferLayout) -> list[UnitModule]:
    """Modules in forward order with the names of the parameters that each reads.

    The order of their backwards is unknown, so no gradient counts as complete before the backward ends.
    """
    return [
        UnitModule(
            module,
            tuple(i for i, bucket in enumerate(layout.buckets) if any(entry.name in names for entry in bucket.params)),
            num_complete=0,
        )
        for module, names in units
    ]


def unit_modules(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The children of a module that run one after another; lists and dicts of modules are replaced by their items."""
    for name, child in module.named_children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from ((f"{name}.{key}", item) for key, item in child.named_children())
        else:
            yield name, child


def traced_units(layout: BufferLayout, *, is_transient: bool, num_blocks: int) -> set[str]:
    """FSDP units whose compiled graphs write weight gradients into the bucket, instead of returning them.

    Hooks run after the backward of a graph. Where buckets borrow storage, those of a unit would all borrow at once, and
    the first one would wait for a reduction that the backward of the graph can hide.

    Args:
        layout: of the buffer.
        is_transient: whether buckets borrow storage.
        num_blocks: blocks of memory that gathered units use in turn. A weight that a graph has saved is then in the
            same memory as those of other units, which does not identify it.
    """
    if num_blocks:
        return set()
    return layout.units_in_one_bucket if is_transient else {param.spec.unit for param in layout.params}


def wait_before_forward(params: Iterable[ParamStore], *_hook_arguments: Any) -> None:
    """Wait until the parameters of a unit are gathered; a hook."""
    for store in params:
        store.wait()
