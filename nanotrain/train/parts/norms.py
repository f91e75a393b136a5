"""Norms at logged steps, equal in every layout; every element is counted on one rank.

ParamsNorm   `--log-params-norm`, `--log-num-zeros-in-grad`: over all parameters after the step, and
             over their gradients
GroupNorms   `--log-norms-by-group`: 2-norms of gradients, updates and parameters by group of
             parameters

groups    embedding, attention, mlp (with routers), experts, norms, head, mtp (multi-token
          prediction)
grad      the summed gradients before clipping
update    the change of the main params, from a copy that exists during the step only
param     the main params after the step
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from nanotrain.comm.collectives import all_reduce
from nanotrain.optim.distributed import Update
from nanotrain.optim.rule import squared_norm
from nanotrain.spec.boxes import TensorBox
from nanotrain.spec.parameters import declare_model
from nanotrain.train.parts.part import BuiltModel, StepPart

KINDS = ("grad", "update", "param")
Boxes = Mapping[TensorBox, Tensor]


class ParamsNorm(StepPart):
    """Logs the norm of the main params and the number of zeros in the gradients."""

    def __init__(self, model: BuiltModel) -> None:
        self._train = model.config.train
        self._optimizer = model.optimizer
        self._context = model.context

    @staticmethod
    def is_enabled(model: BuiltModel) -> bool:
        train = model.config.train
        return train.log_params_norm or train.log_num_zeros_in_grad

    def after_update(self, update: Update, sums: Tensor, *, is_logged: bool) -> Tensor:
        """[2]: norm of all parameters, number of zero gradients; empty if not logged."""
        if not is_logged:
            return sums
        device = self._context.device
        main_params = self._optimizer.tensors_to_save(only="model").values()
        flat = [tensor.detach().to(device).flatten() for tensor in main_params]
        squares = squared_norm(flat, device=device)
        num_zeros = torch.zeros_like(squares)
        for grad in self._optimizer.grad_tensors(once=True).values():
            num_zeros = num_zeros + (grad == 0).sum()
        total = torch.stack([squares, num_zeros])
        all_reduce(total, self._context.groups["world"])
        return torch.stack([total[0].sqrt(), total[1]])

    def metrics(self, numbers: Sequence[float]) -> dict[str, Any]:
        """`params_norm` and `num_zeros_in_grad`, where they are logged."""
        norm, num_zeros = numbers
        entries: dict[str, Any] = {}
        if self._train.log_params_norm:
            entries["params_norm"] = norm
        if self._train.log_num_zeros_in_grad:
            entries["num_zeros_in_grad"] = round(num_zeros)
        return entries


class GroupNorms(StepPart):
    """Logs norms of weights, gradients and updates by group of parameters."""

    def __init__(self, model: BuiltModel) -> None:
        self._optimizer = model.optimizer
        self._context = model.context
        self._group_by_name = {spec.name: spec.group for spec in declare_model(model.plan.shape)}
        self._groups = tuple(dict.fromkeys(self._group_by_name.values()))  # in model order
        self._before: dict[TensorBox, Tensor] = {}  # main params before the update

    @staticmethod
    def is_enabled(model: BuiltModel) -> bool:
        return model.config.train.log_norms_by_group

    def sums(self, *, is_logged: bool) -> Tensor | None:
        """[groups], squared norms of the reduced gradients; copies the main params."""
        if not is_logged:
            return None
        self._before = {box: tensor.clone() for box, tensor in self._params().items()}
        return self._squares(self._optimizer.grad_tensors(once=True))  # the update scales them

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
        """`norms`: norms by kind and group."""
        values = iter(numbers)
        norms = {}
        for kind in KINDS:
            norms[kind] = {group: next(values) for group in self._groups}
        return {"norms": norms}

    def _params(self) -> Boxes:
        return self._optimizer.tensors_to_save(only="model")

    def _squares(self, tensors: Boxes) -> Tensor:
        """[groups] fp64, squared norm of the tensors of each group."""
        by_group: dict[str, list[Tensor]] = {group: [] for group in self._groups}
        for box, tensor in tensors.items():
            group = self._group_by_name[box.name.removeprefix("model/")]
            by_group[group].append(tensor.detach().flatten())
        device = self._context.device
        squares = [squared_norm(flat, device=device) for flat in by_group.values()]
        return torch.stack(squares).double()
