"""Find the first tensor that is not finite: parameters, outputs and gradients of every module are checked.

Each check synchronizes with the device, so this is only for finding a fault.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from nanotrain.comm.collectives import all_gather_object
from nanotrain.comm.heartbeat import Heartbeat
from nanotrain.errors import TrainingFault
from nanotrain.quantities import count_of
from nanotrain.train.hooks.hook import Hook
from nanotrain.train.metrics.step_report import StepReport
from nanotrain.train.run import Run


@dataclass(frozen=True)
class Finding:
    """A tensor that is not finite."""

    what: str  # "the output of layers.0.mlp"
    rank: int
    coords: str
    action: str  # "F0.3": forward of microbatch 3 through stage 0

    @property
    def order(self) -> tuple[int, bool, int]:
        """Sort key, earlier causes first: by microbatch, forward before backward, then in the order of the stages."""
        kind, (stage, microbatch) = self.action[:1], self.action[1:].split(".")
        return int(microbatch), kind != "F", int(stage) if kind == "F" else -int(stage)


class DebugNanHook(Hook):
    """Ends the run at the first step that is skipped, with the module, rank and microbatch of the first such tensor."""

    def __init__(self) -> None:
        self._finding: Finding | None = None

    def before_training(self, run: Run) -> None:
        for stage in run.stages.values():
            for name, module in stage.named_modules():
                module.register_forward_pre_hook(partial(self._before_forward, run=run, name=name or "the stage"))
                module.register_forward_hook(partial(self._after_forward, run=run, name=name or "the stage"))

    def after_step(self, run: Run, report: StepReport) -> None:
        if not report.skipped:
            self._finding = None
            return
        findings = [each for each in all_gather_object(self._finding, run.context.control) if each is not None]
        if not findings:
            raise TrainingFault(
                f"step {report.step} is not finite, but every output and its gradient is",
                why="a weight gradient or its sum over ranks overflowed",
                fix="lower --lr or --clip-grad, or train in bf16 or fp32",
            )
        first = min(findings, key=lambda finding: finding.order)
        where = f"rank {first.rank}{f' ({first.coords})' if first.coords else ''}"
        microbatch = first.action.partition(".")[2]
        raise TrainingFault(
            f"the first tensor of step {report.step} that is not finite is {first.what}",
            why=f"on {where}, microbatch {microbatch}, action {first.action}; "
            f"{count_of(len(findings), 'rank')} found one",
            fix="look at its inputs: the data of that microbatch, the learning rate, the parameters before it",
        )

    def _before_forward(self, module: nn.Module, *_inputs: Any, run: Run, name: str) -> None:
        """Check the parameters of the module, which are gathered now; after the forward they may be released."""
        for parameter_name, parameter in module.named_parameters(recurse=False):
            fp8 = getattr(module, "fp8", None)  # gathered fp8 weights: an overflow makes their scales NaN
            stored = fp8.stored if fp8 is not None and parameter_name == "weight" else None
            values = parameter.detach() if stored is None else stored.inverse_scales
            if values.untyped_storage().nbytes():
                self._check(values, f"parameter {name}.{parameter_name}", run=run)

    def _after_forward(self, module: nn.Module, *inputs_and_output: Any, run: Run, name: str) -> None:
        for tensor in _tensors(inputs_and_output[-1]):
            self._check(tensor.detach(), f"the output of {name}", run=run)
            if tensor.requires_grad:
                tensor.register_hook(partial(self._check, what=f"the gradient of the output of {name}", run=run))

    def _check(self, tensor: Tensor, what: str, *, run: Run) -> None:
        context = run.context
        if self._finding is None and tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            self._finding = Finding(what, context.rank, context.coords_text, _action(context.heartbeat))


def _action(heartbeat: Heartbeat) -> str:
    return heartbeat.read().action or "F0.0"


def _tensors(output: Any) -> Iterator[Tensor]:
    """The tensors of an output."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, tuple | list):
        for part in output:
            yield from _tensors(part)
