"""From plan, inputs and groups to a `Run`, and from a checkpoint back into it."""

import pytest
import torch

from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.config.load import load
from nanotrain.kernels.linear import Linear
from nanotrain.plan.plan import plan_run
from nanotrain.train import build
from nanotrain.train.build import build_run, build_stages
from nanotrain.train.inputs import open_inputs
from nanotrain.train.run import Run
from tests.harness import ranks
from tests.laws.worlds import Case, build_here
from tests.train.small_run import arguments, small_run


def test_the_built_parts_are_those_of_the_plan(tmp_path):
    with small_run(tmp_path, "--num-layers", "2") as run:
        assert list(run.stages) == [stage.spec.index for stage in run.plan.stages]
        assert [dp.layout for dp in run.data_parallel] == [
            buffer.layout for buffer in run.plan.buffers
        ]
        assert run.pipeline.hidden_shape == run.plan.hidden_shape == (1, 16, 32)
        assert run.state.curve_batch_size == run.plan.sampler.global_batch_size


def test_a_plan_for_other_groups_is_not_built(tmp_path):
    config, inputs = open_inputs(load(arguments(tmp_path)))
    plan = plan_run(config, 2, rank=0)
    with pytest.raises(AssertionError, match="other groups"):
        build_run(
            plan, inputs, context=ParallelContext.attach(plan_run(config, 1, rank=0).topology)
        )


def test_initial_weights_depend_on_the_seed_only(tmp_path):
    def weights(*more: str) -> dict[str, torch.Tensor]:
        with small_run(tmp_path, *more) as run:
            return {
                name: weight.detach().clone() for name, weight in run.stages[0].named_parameters()
            }

    first, again, other = weights(), weights("--ddp-bucket-size", "100"), weights("--seed", "3")
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["embedding.word.weight"], other["embedding.word.weight"])


def test_parameters_are_views_of_one_buffer_per_kind(tmp_path):
    moe = ("--num-layers", "2", "--num-experts", "4")
    with small_run(tmp_path, *moe) as run:
        stages = build_stages(run.plan, run.context)
        dense, experts = (dp for stage in stages.values() for dp in stage.callbacks)
        assert dense.params.keys() | experts.params.keys() == {
            p.spec.name for p in stages[0].module.params
        }
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


@ranks(2, pp=2)
def test_a_zero_bubble_schedule_gives_every_stage_a_queue(ctx):
    parallel = {"pipeline_model_parallel_size": 2, "pipeline_schedule": "zb-h1"}
    run = build_here(ctx, Case().but(parallel=parallel))
    assert all(stage.wgrad_queue is not None for stage in build_stages(run.plan, ctx).values())


def overlaps_of(run: Run, name: str = "overlap") -> set[str]:
    """The implementations of products that overlap with transfers, of all linear layers."""
    (stage,) = run.stages.values()
    layers = [module for module in stage.modules() if isinstance(module, Linear)]
    return {getattr(layer.compute.keywords["tensor_parallel"], name) for layer in layers}


@ranks(2, tp=2)
def test_products_in_pieces_are_chosen_when_the_model_is_built(ctx: ParallelContext) -> None:
    parallel = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    case = Case(2).but(parallel=parallel)
    assert overlaps_of(build_here(ctx, case)) == {""}
    in_pieces = case.but(parallel={"tp_comm_overlap": True})
    assert overlaps_of(build_here(ctx, in_pieces)) == {"pieces"}
    for recipe, name in (("tensorwise", "pieces"), ("rowwise", "pieces"), ("mxfp8", "")):
        precision = {"fp8_format": "e4m3", "fp8_recipe": recipe}
        run = build_here(ctx, in_pieces.but(precision=precision))
        assert overlaps_of(run) == {""}
        assert overlaps_of(run, "fp8_overlap") == {name}
    # last: the threads of both ranks patch one module
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "has_symmetric_memory", lambda group, device: True)
        assert overlaps_of(build_here(ctx, in_pieces)) == {"symmetric"}
