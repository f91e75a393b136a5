"""Stages with storage: parameters are views of the planned buffers."""

from nanotrain.config.load import load
from nanotrain.train.plans.plan import plan_run
from nanotrain.train.stages import all_data_parallel, build_stages
from nanotrain.train.start.inputs import open_inputs
from tests.harness import ranks
from tests.laws.worlds import Case, build_here
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


@ranks(2, pp=2)
def test_a_zero_bubble_schedule_gives_every_stage_a_queue(ctx):
    parallel = {"pipeline_model_parallel_size": 2, "pipeline_schedule": "zb-h1"}
    run = build_here(ctx, Case().but(parallel=parallel))
    assert all(stage.wgrad_queue is not None for stage in build_stages(run.plan, ctx).values())
