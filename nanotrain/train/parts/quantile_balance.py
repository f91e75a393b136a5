"""`--moe-router-load-balancing-type quantile_balancing`: expert biases from the scores of the step.

Every step sets the bias of each expert to the quantile with which it would have got an even share
of the tokens (`model/router_quantiles.py`), blended with the last one by
`--moe-router-quantile-balancing-ema`.
"""

import torch
from torch import Tensor

from nanotrain.comm.collectives import all_reduce
from nanotrain.model.router import Router
from nanotrain.model.router_quantiles import quantile_bias
from nanotrain.model.router_stats import routers_of
from nanotrain.optim.distributed import Update
from nanotrain.train.parts.part import BuiltModel, StepPart


class QuantileBalance(StepPart):
    """Sets the expert biases of this rank's routers to quantiles of the biases that tokens require.

    The biases are in a checkpoint as tensors of `RouterBalance`.
    """

    def __init__(self, model: BuiltModel) -> None:
        moe = model.config.model.moe
        assert moe is not None, "only a mixture of experts has routers"
        self._fraction = moe.router_topk / moe.num_choices
        self._ema = moe.router_quantile_balancing_ema
        self._groups = model.context.groups
        frozen = set()
        for planned in model.plan.stages:
            for param in planned.params:
                if not param.spec.is_trainable:
                    frozen.add(param.spec.name)
        self._routers: list[Router] = []
        for stage in model.stages.values():
            for name, router in routers_of(stage).items():
                assert isinstance(router, Router)
                is_balanced = router.required_bias is not None
                if is_balanced and f"{name}.weight" not in frozen:
                    self._routers.append(router)

    @staticmethod
    def is_enabled(model: BuiltModel) -> bool:
        moe = model.config.model.moe
        return moe is not None and moe.balances_quantiles

    def after_update(self, update: Update, sums: Tensor, *, is_logged: bool) -> Tensor:
        """Update the biases from the counts of the step; a skipped step leaves them.

        Two all-reduces of the counts.
        """
        if not self._routers:
            return sums
        counts = torch.stack([_counts_of(router) for router in self._routers])
        # tensor-parallel ranks have other tokens, or all of them have the same
        for name in ("tp", "dp_cp"):
            all_reduce(counts, self._groups[name])
        for router, router_counts in zip(self._routers, counts, strict=True):
            bias = router.expert_bias
            assert bias is not None, "a rule demands expert biases"
            target = quantile_bias(router_counts, bias, fraction=self._fraction)
            blended = self._ema * bias.double() + (1.0 - self._ema) * target
            bias.copy_(torch.where(update.skipped, bias.double(), blended))
            _counts_of(router).zero_()
        return sums


def _counts_of(router: Router) -> Tensor:
    assert router.required_bias is not None, "routers count where biases are quantiles"
    return router.required_bias.counts
