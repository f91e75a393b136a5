"""The norm of all parameters, the zeros in gradients and the largest logit, at logged steps; equal in every layout."""

import torch
from torch import Tensor

from nanotrain.comm.collectives import all_reduce
from nanotrain.model.qk_clip import logits_of
from nanotrain.optim.distributed import squared_norm
from nanotrain.train.hooks.hook import Hook
from nanotrain.train.metrics.step_report import StepReport
from nanotrain.train.run import Run


class NormsHook(Hook):
    """Sets `params_norm` and `num_zeros_in_grad` of the report if they are enabled; called before the log."""

    def after_step(self, run: Run, report: StepReport) -> None:
        if not report.is_logged:
            return
        train = run.config.train
        sums = torch.stack([squared_params_norm(run), run.optimizer.num_zero_grads()])
        all_reduce(sums, run.context.group("world"))
        if train.log_params_norm:
            report.params_norm = float(sums[0].sqrt())
        if train.log_num_zeros_in_grad:
            report.num_zeros_in_grad = round(float(sums[1]))


class MaxLogitHook(Hook):
    """Sets `max_attention_logit` of the report at logged steps, over all layers and ranks; called before the log."""

    def after_step(self, run: Run, report: StepReport) -> None:
        if not report.is_logged:
            return
        largest = torch.full((), -torch.inf, device=run.context.device)
        for stage in run.stages.values():
            for logits in logits_of(stage).values():
                largest = torch.maximum(largest, logits.peak)
                logits.peak.fill_(-torch.inf)
        all_reduce(largest, run.context.group("world"), op="max")
        report.max_attention_logit = float(largest)


def squared_params_norm(run: Run) -> Tensor:
    """The sum of the squares of the main parameters that this rank saves, every element on one rank: fp64 scalar."""
    mains = run.optimizer.tensors_to_save(only="model").values()
    device = run.context.device
    return squared_norm([tensor.detach().to(device).flatten() for tensor in mains], device=device)
