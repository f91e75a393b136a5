"""Norms at logged steps, equal in every layout; every element is counted on one rank.

ParamsNorm   `--log-params-norm`, `--log-num-zeros-in-grad`: of all parameters after the step, and of its gradients
GroupNorms   `--log-norms-by-group`: 2-norms of gradients, updates and parameters by group of parameters

groups    embedding, attention, mlp (with routers), experts, norms, head, mtp (multi-token prediction)
grad      the summed gradients before clipping
update    the change of the main params, from a copy that exists during the step only
param     the main params after the step
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from nanotrain.comm.collectives import all_reduce
from nanotrain.optim.distributed import Update, squared_norm
from nanotrain.spec.boxes import TensorBox
from nanotrain.spec.parameters import declare_model
from nanotrain.train.parts.part import BuiltModel, StepPart

KINDS = ("grad", "update", "param")
Boxes = Mapping[TensorBox, Tensor]


class ParamsNorm(StepPart):
    """The norm of the main params and the number of zeros in the gradients."""

    def __init__(self, model: BuiltModel) -> None:
        self._train, self._optimizer, self._context = (
            model.config.train,
            model.optimizer,
            model.context,
        )

    def after_update(self, update: Update, sums: Tensor, *, is_logged: bool) -> Tensor:
        if not is_logged:
            return sums
        device = self._context.device
        mains = self._optimizer.tensors_to_save(only="model").values()
        squares = squared_norm(
            [tensor.detach().to(device).flatten() for tensor in mains], device=device
        )
        grads, none = self._optimizer.grad_tensors(once=True).values(), torch.zeros_like(squares)
        total = torch.stack([squares, sum(((grad == 0).sum() for grad in grads), start=none)])
        all_reduce(total, self._context.groups["world"])
        return torch.stack([total[0].sqrt(), total[1]])

    def metrics(self, numbers: Sequence[float]) -> dict[str, Any]:
        norm = {"params_norm": numbers[0]} if self._train.log_params_norm else {}
        zeros = (
            {"num_zeros_in_grad": round(numbers[1])} if self._train.log_num_zeros_in_grad else {}
        )
        return norm | zeros


class GroupNorms(StepPart):
    """Norms by group of parameters."""

    def __init__(self, model: BuiltModel) -> None:
        self._optimizer, self._context = model.optimizer, model.context
        self._group_of = {spec.name: spec.group for spec in declare_model(model.plan.shape)}
        self._groups = tuple(dict.fromkeys(self._group_of.values()))  # in the order of the model
        self._before: dict[TensorBox, Tensor] = {}  # main params before the update

    def sums(self, *, is_logged: bool) -> Tensor | None:
        """[groups], squares of the reduced gradients, which the update multiplies; copies the main
        params.
        """
        if not is_logged:
            return None
        self._before = {box: tensor.clone() for box, tensor in self._params().items()}
        return self._squares(self._optimizer.grad_tensors(once=True))

    def after_update(self, update: Update, sums: Tensor, *, is_logged: bool) -> Tensor:
        """[kinds * groups] fp64; not finite for the gradients of a skipped step."""
        if not is_logged:
            return sums
        params = self._params()
        updates = {box: tensor - self._before[box] for box, tensor in params.items()}
        self._before = {}
        squares = torch.cat([self._squares(updates), self._squares(params)])
        all_reduce(squares, self._context.groups["world"])
        return torch.cat([sums.sqrt() / update.loss_scale, squares.sqrt()])

    def metrics(self, numbers: Sequence[float]) -> dict[str, Any]:
        values = iter(numbers)
        return {"norms": {kind: {group: next(values) for group in self._groups} for kind in KINDS}}

    def _params(self) -> Boxes:
        return self._optimizer.tensors_to_save(only="model")

    def _squares(self, tensors: Boxes) -> Tensor:
        of_group: dict[str, list[Tensor]] = {group: [] for group in self._groups}
        for box, tensor in tensors.items():
            of_group[self._group_of[box.name.removeprefix("model/")]].append(
                tensor.detach().flatten()
            )
        return torch.stack(
            [squared_norm(each, device=self._context.device) for each in of_group.values()]
        ).double()
