"""QK-clip in a run: after the update of a step, before parameters are gathered (`model/qk_clip.py`)."""

from nanotrain.model.qk_clip import collect_factors
from nanotrain.train.run import Run


def clip_query_key(run: Run, *, skipped: bool) -> None:
    """Scale the main params of query and key weights by the logits of the step; no weight of a skipped step.

    Two all-reduces of one number per layer and head of each stage.
    """
    tp, dp_cp, config = run.context.group("tp"), run.context.group("dp_cp"), run.config.optim
    for stage in run.stages.values():
        factors = collect_factors(stage, config, shape=run.plan.shape, tp=tp, dp_cp=dp_cp)
        if not skipped:
            run.optimizer.scale_rows(factors)
