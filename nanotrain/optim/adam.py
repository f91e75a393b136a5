"""`--optimizer adam`: AdamW from torch (Loshchilov & Hutter 2019), over param ranges of flat shards."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.profiler import record_function

from nanotrain.config.config import OptimConfig
from nanotrain.optim.rule import ParamRange, UpdateRule, param_groups


class FusedAdamW:
    """torch's fused AdamW, whose exp_avg and exp_avg_sq are the state tensors of the ranges.

    The state exists before the first step, so that memory does not grow there and a checkpoint can be read into it.
    torch.optim.AdamW computes the same, but creating one imports torch._dynamo: 1.4 to 5 s of CPU time per process.
    """

    def __init__(self, ranges: Sequence[ParamRange], config: OptimConfig) -> None:
        self.param_groups: list[dict[str, Any]] = param_groups(ranges, config.weight_decay)
        for group in self.param_groups:
            group["lr"] = config.lr
        self.state: dict[Tensor, dict[str, Tensor]] = {
            part.main_param: {"step": torch.zeros((), device=part.main_param.device), **part.state} for part in ranges
        }
        self._config = config

    @torch.no_grad()
    @record_function("Optimizer.step#AdamW.step")  # named in traces as torch.optim.AdamW is
    def step(self) -> None:
        """Update the params of all groups from their `.grad`."""
        for group in self.param_groups:
            params = group["params"]
            states = [self.state[param] for param in params]
            adamw(
                params,
                [param.grad for param in params],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [],
                [state["step"] for state in states],
                fused=True,
                amsgrad=False,
                maximize=False,
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                beta1=self._config.adam_beta1,
                beta2=self._config.adam_beta2,
                eps=self._config.adam_eps,
            )


ADAM = UpdateRule(state_names=("exp_avg", "exp_avg_sq"), build=FusedAdamW)
