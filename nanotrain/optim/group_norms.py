"""`--log-norms-by-group`: 2-norms of gradients, updates and parameters by group of parameters, in a logged step.

    groups    embedding, attention, mlp (with routers), experts, norms, head, mtp (multi-token prediction)
    grad      the summed gradients before clipping
    update    the change of the main params, from a copy that exists during the step only
    param     the main params after the step

Every element is counted on one rank, so one all-reduce of squares gives the norms of the whole model. They stay on the
device until the step is read.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from nanotrain.comm.collectives import all_reduce
from nanotrain.comm.group import Group
from nanotrain.optim.distributed import DistributedOptimizer, squared_norm
from nanotrain.spec.boxes import TensorBox
from nanotrain.spec.params import ParamSpec

KINDS = ("grad", "update", "param")
Boxes = Mapping[TensorBox, Tensor]


@dataclass(frozen=True)
class BeforeUpdate:
    """What is kept until the update is done."""

    grads: Tensor  # [groups] fp64, squares of this rank's part
    params: Boxes  # copies of this rank's part of the main params


class GroupNorms:
    """Measures the norms of a step.

    Args:
        optimizer: of this rank.
        specs: every parameter of the whole model.
        world: all ranks.
        device: of the results.
    """

    def __init__(
        self, optimizer: DistributedOptimizer, specs: Iterable[ParamSpec], *, world: Group, device: torch.device
    ) -> None:
        self._optimizer, self._world, self._device = optimizer, world, device
        self._group_of = {spec.name: spec.group for spec in specs}
        self.groups = tuple(dict.fromkeys(self._group_of.values()))  # in the order of the model

    def start(self) -> BeforeUpdate:
        """Square the reduced gradients, before the update multiplies them, and copy the main params."""
        grads = self._optimizer.grad_tensors(once=True)
        params = self._optimizer.tensors_to_save(only="model")
        return BeforeUpdate(self._squares(grads), {box: tensor.clone() for box, tensor in params.items()})

    def finish(self, before: BeforeUpdate, *, loss_scale: float | Tensor) -> Tensor:
        """The norms after the update, over all ranks; every rank calls this.

        Args:
            before: from `start`.
            loss_scale: factor of the gradients in this step.

        Returns:
            [kinds * groups] fp64, for `by_group`; not finite for the gradients of a skipped step.
        """
        params = self._optimizer.tensors_to_save(only="model")
        updates = {box: tensor - before.params[box] for box, tensor in params.items()}
        squares = torch.cat([before.grads, self._squares(updates), self._squares(params)])
        all_reduce(squares, self._world)
        norms = squares.sqrt()
        norms[: len(self.groups)] /= loss_scale
        return norms

    @property
    def size(self) -> int:
        """Numbers that `finish` returns."""
        return len(KINDS) * len(self.groups)

    def by_group(self, norms: Iterable[float]) -> dict[str, dict[str, float]]:
        """The numbers of `finish` by kind and group."""
        values = iter(norms)
        return {kind: {group: next(values) for group in self.groups} for kind in KINDS}

    def _squares(self, tensors: Boxes) -> Tensor:
        of_group: dict[str, list[Tensor]] = {group: [] for group in self.groups}
        for box, tensor in tensors.items():
            of_group[self._group_of[box.name.removeprefix("model/")]].append(tensor.detach().flatten())
        return torch.stack([squared_norm(each, device=self._device) for each in of_group.values()]).double()
