"""Stages with storage: parameters are views of the planned buffers."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.config.config import ParallelConfig
from nanotrain.config.load import load
from nanotrain.model.context import BatchContext
from nanotrain.parallel.tp.layers import ColumnParallelLinears
from nanotrain.topology.topology import Topology
from nanotrain.train.plans.plan import plan_run
from nanotrain.train.stages import all_data_parallel, build_stages
from nanotrain.train.start.inputs import open_inputs
from tests.harness import ranks
from tests.laws.worlds import Case, build_here, train_steps
from tests.train.small_run import arguments, small_run


def test_parameters_are_views_of_one_buffer_per_kind(tmp_path):
    moe = ("--num-layers", "2", "--num-experts", "4")
    with small_run(tmp_path, *moe) as run:
        stages = build_stages(run.plan, run.context)
        dense, experts = all_data_parallel(stages)
        assert dense.params.keys() | experts.params.keys() == {p.spec.name for p in stages[0].params}
        assert all(".experts." in name for name in experts.params)
        for dp in (dense, experts):
            buffer = dp.param_buffer.untyped_storage().data_ptr()
            for name in dp.params:
                assert stages[0].module.get_parameter(name).untyped_storage().data_ptr() == buffer


def test_weight_gradients_are_deferred_only_with_w_actions(tmp_path):
    config, _ = open_inputs(load(arguments(tmp_path)))
    assert not plan_run(config, 1, rank=0).train_schedule.defers_wgrad
    with small_run(tmp_path) as run:
        (stage,) = build_stages(run.plan, run.context).values()
        assert stage.wgrad_queue is None


def test_projections_are_joined_where_all_of_their_weights_can_be():
    context = ParallelContext.attach(Topology.of(ParallelConfig(), 1))

    def joined(**parallel: Any) -> list[bool]:
        model = {"num_layers": 1, "kv_channels": 16, "ffn_hidden_size": 64}
        fields = {"projection_fusion": True, "data_parallel_sharding_strategy": "optim_grads_params"} | parallel
        run = build_here(context, Case().but(parallel=fields, model=model))
        assert run.stages[0].state_dict().keys() == {param.spec.name for param in run.plan.stages[0].params}
        found = [module for module in run.stages[0].modules() if isinstance(module, ColumnParallelLinears)]
        frozen = found[0].layers[0].weight.requires_grad_(False)
        assert not found[0].can_join, "its gradient is not wanted"
        frozen.requires_grad_(True)
        return [module.joined is not None for module in found]

    assert joined() == [True, True]
    assert joined(projection_fusion=None) == [False, False], "off on CPUs"
    assert joined(ddp_bucket_size=11000) == [False, True], "a bucket ends between key and value"
    assert joined(projection_fusion=None, fsdp_double_buffer=True) == [False, False]


class Products(TorchDispatchMode):
    """Counts matrix products, and copies that join tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        self.counts["products" if name in ("mm", "addmm_") else name] += 1
        return func(*args, **(kwargs or {}))


def test_joined_projections_take_nine_products_less_and_no_copy_that_joins_gradients():
    context = ParallelContext.attach(Topology.of(ParallelConfig(), 1))
    model = {"num_layers": 1, "kv_channels": 16, "ffn_hidden_size": 64}
    found = {}
    for fuses in (False, True):
        parallel = {"projection_fusion": fuses, "ddp_bucket_size": 100_000}
        run = build_here(context, Case(1).but(parallel=parallel, model=model, train={"global_batch_size": 1}))
        with Products() as found[fuses]:
            train_steps(run, 1)
    apart, joined = (found[fuses].counts for fuses in (False, True))
    assert apart["products"] - joined["products"] == 3 * (2 + 1)
    assert apart["cat"] == joined["cat"]


@pytest.mark.parametrize("model", [{}, {"qk_layernorm": True}, {"position_embedding_type": "none"}], ids=str)
def test_joined_projections_keep_as_much_for_the_backward_as_apart(model):
    context = ParallelContext.attach(Topology.of(ParallelConfig(), 1))
    sizes = {"num_layers": 1, "kv_channels": 16, "ffn_hidden_size": 64}
    num_bytes = []
    for fuses in (False, True):
        parallel = {"projection_fusion": fuses, "ddp_bucket_size": 100_000}
        run = build_here(context, Case(1).but(parallel=parallel, model=sizes | model, train={"global_batch_size": 2}))
        batch, saved = run.batch_iterator.next(), []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, saved=saved: saved.append(x) or x, lambda x: x):
            loss = run.stages[0](None, BatchContext.of(batch.microbatches[0], cp=context.group("cp")))
        assert loss.grad_fn is not None, "the graph is alive, and no storage is used twice"
        params = {param.untyped_storage().data_ptr() for param in run.stages[0].parameters()}
        storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in saved}
        num_bytes.append(sum(size for address, size in storages.items() if address not in params))
    assert num_bytes[0] == num_bytes[1] > 100_000


@ranks(2, pp=2)
def test_a_zero_bubble_schedule_gives_every_stage_a_queue(ctx):
    parallel = {"pipeline_model_parallel_size": 2, "pipeline_schedule": "zb-h1"}
    run = build_here(ctx, Case().but(parallel=parallel))
    assert all(stage.wgrad_queue is not None for stage in build_stages(run.plan, ctx).values())
