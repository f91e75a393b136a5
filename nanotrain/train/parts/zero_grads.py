"""Weights of fp8 products whose gradients are zeros, at logged steps.

A gradient that quantizes to zeros, by underflow or by a kernel that returns none, leaves its
weights as they are without a word: losses stay finite. Zeros are counted on the device, over all
ranks, in the all-reduce of the gradient norm. metrics.jsonl has `zero_grads`: the share of zeros
of each weight above `NOTED`. A warning names weights that had nothing but zeros at `REPEATED`
logged steps in a row: weights that start from zeros have such gradients in their first step.

Source: github.com/NVIDIA/TransformerEngine/pull/3281, NVFP4 gradients that were all zeros.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from nanotrain.kernels.fp8.layer import layers_in_bf16
from nanotrain.log import get_logger
from nanotrain.spec.boxes import TensorBox
from nanotrain.spec.parameters import declare_model
from nanotrain.train.parts.part import BuiltModel, StepPart

log = get_logger(__name__)

NOTED = 0.5  # share of zeros from which on metrics.jsonl names a weight
REPEATED = 2  # logged steps with zeros only before the warning


class ZeroGrads(StepPart):
    """Logs weights of fp8 products with many zeros in their gradients."""

    def __init__(self, model: BuiltModel) -> None:
        fp8 = model.config.precision.fp8
        in_bf16 = layers_in_bf16(fp8, model.config.model.num_layers)
        units = {f"layers.{layer}" for layer in in_bf16}
        self._optimizer = model.optimizer
        self._device = model.context.device
        self._numel: dict[str, int] = {}  # elements of each weight, in model order
        for spec in declare_model(model.plan.shape):
            if spec.in_fp8 and spec.unit not in units:
                self._numel[spec.name] = TensorBox.full(spec.name, spec.shape).box.numel
        self._steps: Counter[str] = Counter()  # logged steps with zeros only, by weight
        self._earlier = Counter(self._steps)  # the same before the last step
        self._is_warned = False

    @staticmethod
    def is_enabled(model: BuiltModel) -> bool:
        return model.config.precision.fp8 is not None

    def sums(self, *, is_logged: bool) -> Tensor | None:
        """[weights], zeros in the gradients of this rank."""
        if not is_logged:
            return None
        return count_zeros(
            self._optimizer.grad_tensors(once=True), list(self._numel), device=self._device
        )

    def metrics(self, numbers: Sequence[float]) -> dict[str, Any]:
        """The weights with many zeros; warns once of weights with nothing else."""
        self._earlier = Counter(self._steps)
        shares = {}
        for (name, numel), num_zeros in zip(self._numel.items(), numbers, strict=True):
            shares[name] = num_zeros / numel
            self._steps[name] = self._steps[name] + 1 if shares[name] == 1 else 0
        self._warn()
        noted = {name: round(share, 4) for name, share in shares.items() if share >= NOTED}
        return {"zero_grads": noted} if noted else {}

    def take_back(self) -> None:
        self._steps = self._earlier

    def _warn(self) -> None:
        """One line that names the weights, once per run."""
        names = [name for name, steps in self._steps.items() if steps >= REPEATED]
        if not names or self._is_warned:
            return
        self._is_warned = True
        more = f" and {len(names) - 1:,} more weights" if len(names) > 1 else ""
        log.warning(
            "the gradient of %s%s is 100 %% zeros at %d logged steps in a row: its gradients in "
            "low precision underflow, or a kernel returns zeros; set --first-last-layers-bf16, "
            "--no-fp8-wgrad or another --fp8-recipe",
            names[0],
            more,
            REPEATED,
        )


def count_zeros(
    grads: Mapping[TensorBox, Tensor], names: Sequence[str], *, device: torch.device
) -> Tensor:
    """[names] fp64, zeros in the parts of the named weights."""
    counts = torch.zeros(len(names), dtype=torch.float64, device=device)
    index = {name: i for i, name in enumerate(names)}
    for box, grad in grads.items():
        name = box.name.removeprefix("model/")
        if name in index:
            counts[index[name]] += (grad == 0).sum()
    return counts
