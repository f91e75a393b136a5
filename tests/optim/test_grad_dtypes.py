"""Gradients in low precision, averaged, all-reduced or sharded across instances are those of plain
fp32 to the bit.

Gradients are small integers times powers of two, so that every dtype and order of summation is
exact.
"""

from itertools import product

import pytest
import torch
from torch import Tensor

from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.config.config import OptimConfig, PrecisionConfig
from nanotrain.optim.distributed import DistributedOptimizer
from nanotrain.parallel.dp.data_parallel import DataParallel
from nanotrain.parallel.dp.layout import LayoutRules, plan_layout
from nanotrain.parallel.dp.options import STRATEGIES, DataParallelOptions, ReduceGroups
from nanotrain.precision.dtypes import Precision
from nanotrain.precision.loss_scale import LossScale
from tests.harness import run_ranks
from tests.parallel.dp.toys import BUCKET_SIZE, SHAPES, Toy, backward, groups_of, local_params

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
State = dict[str, Tensor]
OPTIONS = (
    {},
    {"overlap_grad_reduce": True},
    {"averages": True},
    {"by_all_to_all": True, "overlap_grad_reduce": True},
    {"keeps_full_grads": True},
)


def train(
    ctx: ParallelContext, strategy: str, *, precision: Precision, outer: bool, options: dict
) -> list:
    """Gradients, main params and moments, and weights of this rank after two steps of three
    microbatches.
    """
    groups = groups_of(ctx, strategy)
    groups = ReduceGroups(groups.shard, groups.replicate, shards_across=outer)
    stage = Toy(dtype=precision.params, shapes=SHAPES[:4])
    rules = LayoutRules(groups.shard.size, groups.replicate.size if outer else 1, BUCKET_SIZE)
    parallel = DataParallel(
        stage,
        plan_layout(local_params(stage), rules),
        groups=groups,
        options=DataParallelOptions(STRATEGIES[strategy], **options),
        precision=precision,
        device=torch.device("cpu"),
    )
    for param in stage.parameters():
        param.data.copy_(torch.linspace(-1, 1, param.numel()).view(param.shape))
    config = OptimConfig(lr=0.01, clip_grad=0.0, weight_decay=0.1)
    scale = LossScale(PrecisionConfig())
    optimizer = DistributedOptimizer(
        [parallel], config, precision=precision, loss_scale=scale, groups=ctx.groups
    )
    num_ranks = ctx.topology.world_size if options.get("averages") else 1
    for step in (1, 2):
        parallel.begin_step()
        for factor in (1.0, 1.0, 2.0):  # 11 * (1 + 2 + 4 + 8) has the 8 bits of bf16
            loss = stage(2.0**ctx.rank * factor * step * num_ranks)
            backward(parallel, loss, is_last=factor == 2.0)
        parallel.finish_grad_reduce()
        optimizer.step(0.01)
        parallel.start_param_gather()
        parallel.wait_for_params()
    weights = {name: param.detach().float().clone() for name, param in stage.named_parameters()}
    results = (optimizer.grad_tensors(), optimizer.state_tensors())
    return [
        *({box: view.float().clone() for box, view in tensors.items()} for tensors in results),
        weights,
    ]


def variants_on_rank(ctx, params, num_instances):
    dtypes = [Precision(params)]
    if params is not FP32:
        dtypes += [
            Precision(params, grads=params),
            *([Precision(params, grads=BF16, main_grads=BF16)] * (params is BF16)),
        ]
    results = {}
    for strategy, precision, outer, options in product(
        ("no_shard", "optim", "optim_grads"), dtypes, (False, True)[:num_instances], OPTIONS
    ):
        if (
            outer
            and strategy == "no_shard"
            or options.get("keeps_full_grads")
            and strategy != "optim"
        ):
            continue
        key = f"{strategy} {precision.grads} {precision.main_grads} outer={outer} {options}"
        results[key] = train(ctx, strategy, precision=precision, outer=outer, options=options)
    return results


def assembled(states: list[dict]) -> State:
    """Global tensors; every element is on some rank, and replicas agree."""
    tensors: State = {}
    for box, view in (item for state in states for item in state.items()):
        target = tensors.setdefault(box.name, torch.full(box.shape, float("nan")))[box.box.slices()]
        assert (target.isnan() | (target == view)).all(), f"replicas of {box.name} differ"
        target.copy_(view)
    assert not any(tensor.isnan().any() for tensor in tensors.values())
    return tensors


@pytest.mark.parametrize("params", [FP32, BF16, FP16])
@pytest.mark.parametrize(("num_ranks", "instances"), [(2, 1), (4, 2)])
def test_exact_sums_are_the_same_in_every_precision_and_form(params, num_ranks, instances):
    by_rank = run_ranks(
        num_ranks,
        variants_on_rank,
        params,
        instances,
        strategy="optim",
        instances=instances,
        shares=True,
    )
    reference = None
    for key in by_rank[0]:
        grads, state = (assembled([results[key][part] for results in by_rank]) for part in (0, 1))
        reference = reference or (grads, state)
        for name, grad in grads.items():
            assert torch.equal(grad, reference[0][name]), f"{key}: {name}"
        # AdamW rounds the ends of a range, which differ between layouts, in another order
        for name, tensor in state.items():
            torch.testing.assert_close(
                tensor, reference[1][name], rtol=1e-6, atol=1e-7, msg=f"{key}: {name}"
            )
        for results in by_rank:  # every rank has gathered the updated parameters
            for name, weight in results[key][2].items():
                assert torch.equal(weight, state[f"model/{name}"].to(params).float()), (
                    f"{key}: {name}"
                )
