"""QK-clip in a run: after the update of a step, before parameters are gathered (`model/qk_clip.py`)."""

import torch
from torch import Tensor

from nanotrain.model.qk_clip import collect_factors
from nanotrain.train.run import Run


def clip_query_key(run: Run, *, skipped: Tensor) -> None:
    """Scale the main params of query and key weights by the logits of the step; no weight of a skipped step.

    Two all-reduces of one number per layer and head of each stage.

    Args:
        run: whose optimizer has just updated.
        skipped: bool scalar on the device, so that the host need not wait for it.
    """
    tp, dp_cp, config = run.context.group("tp"), run.context.group("dp_cp"), run.config.optim
    for stage in run.stages.values():
        factors = collect_factors(stage, config, shape=run.plan.shape, tp=tp, dp_cp=dp_cp)
        run.optimizer.scale_rows({name: torch.where(skipped, 1.0, rows) for name, rows in factors.items()})
