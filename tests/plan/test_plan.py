"""A plan needs no world: it is made for any rank of any cluster, and it equals what a built run
holds (law L5).
"""

import time
from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.config.config import Config
from nanotrain.config.load import load
from nanotrain.data.gpt import SyntheticDataset
from nanotrain.data.loader import GlobalBatchLoader
from nanotrain.errors import ConfigError, ConfigErrors, TopologyError
from nanotrain.plan.plan import Plan, check_names, plan_run
from nanotrain.plan.traffic import sent_bytes
from nanotrain.spec.counts import num_parameters
from nanotrain.train.run import Run
from nanotrain.train.step import train_step
from tests.harness import SHORT_NAMES, run_ranks
from tests.laws.worlds import Case, build_here

# recipe -> ranks of the cluster that it names, and further settings
CLUSTERS: list[tuple[str, int, str]] = [
    ("tiny", 2, "--vocab-size 2048"),
    ("tiny_moe", 2, "--vocab-size 2048"),
    ("gpt2_124m", 8, ""),
    ("llama1b", 8, ""),
    ("llama3_8b", 64, ""),
    ("llama7b", 64, ""),
    ("qwen3_8b", 64, ""),
    ("llama70b", 256, ""),
    ("mixtral_8x7b", 32, ""),
    ("qwen3_30b_a3b", 16, ""),
    ("nemotron3_nano_30b_a3b", 32, ""),
    ("deepseek_v3", 1024, ""),
    ("deepseek_v32", 1024, ""),
]
LAYOUT_70B = "--tensor-model-parallel-size 8 --sequence-parallel --pipeline-model-parallel-size 4"
LARGE: list[tuple[str, int, str]] = [
    ("llama70b", 16384, LAYOUT_70B),
    ("llama70b", 16384, f"{LAYOUT_70B} --num-virtual-stages-per-pipeline-rank 2 --pipeline-schedule interleaved"
     " --global-batch-size 4096"),
    ("llama3_8b", 16384, "--context-parallel-size 16 --tensor-model-parallel-size 4 --global-batch-size 1024"),
    ("deepseek_v3", 16384, ""),
]  # fmt: skip


class NoTensors(TorchDispatchMode):
    """Raises on every torch operation, those that allocate included."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        raise AssertionError(f"a plan ran {function}")


def config_of(recipe: str, settings: str) -> Config:
    return load([f"+config={recipe}", *settings.split()], to_train=False).config


def plan_without_a_world(
    config: Config, world_size: int, rank: int, monkeypatch: pytest.MonkeyPatch
) -> Plan:
    """Plan, and read everything from the plan, without process group, module or tensor."""

    def refuse(self: nn.Module, *args: object, **kwargs: object) -> None:
        raise AssertionError("a plan made a module")

    monkeypatch.setattr(nn.Module, "__init__", refuse)
    assert not dist.is_initialized()
    with NoTensors():
        plan = plan_run(config, world_size, rank=rank)
        assert plan.resident_bytes.total > 0 and sent_bytes(plan) is not None
    return plan


@pytest.mark.parametrize(("recipe", "world_size", "settings"), [*CLUSTERS, *LARGE])
def test_every_recipe_is_planned_for_any_rank_without_a_world(
    recipe, world_size, settings, monkeypatch
):
    config = config_of(recipe, settings)
    for rank in (0, world_size // 2 + world_size // 3, world_size - 1):
        start = time.process_time()
        plan = plan_without_a_world(config, world_size, rank, monkeypatch)
        print(f"{recipe} rank {rank} of {world_size}: {time.process_time() - start:.2f} s CPU")
        assert plan.groups["world"].size == world_size and plan.groups["world"].rank == rank
        assert all(spec.rank == rank for spec in plan.groups.values())
        assert plan.resident_bytes.params > 0
        assert plan.train_schedule.num_microbatches == plan.num_microbatches
        sent = sent_bytes(plan)
        if plan.groups["dp_shard"].size > 1:
            assert sent["dp_shard", "reduce_scatter"] > 0 and sent["dp_shard", "all_gather"] > 0
        assert (("pp", "p2p") in sent) is (plan.groups["pp"].size > 1)


@pytest.mark.parametrize(
    ("recipe", "world_size", "settings"), [("mixtral_8x7b", 32, ""), ("llama70b", 32, LAYOUT_70B)]
)
def test_the_ranks_of_one_replica_hold_every_parameter_once(recipe, world_size, settings):
    config = config_of(recipe, settings)
    plans = [plan_run(config, world_size, rank=rank) for rank in range(world_size)]
    boxes = {
        (p.spec.name, p.box): p.box.numel
        for plan in plans
        for stage in plan.stages
        for p in stage.params
    }
    padding = (plans[0].shape.padded_vocab_size - plans[0].shape.vocab_size) * plans[
        0
    ].shape.hidden_size
    tables = 1 if plans[0].shape.is_tied else 2
    assert sum(boxes.values()) == num_parameters(plans[0].shape) + tables * padding


@pytest.mark.parametrize(
    ("section", "field", "name", "suggestion"),
    [
        ("parallel", "pipeline_schedule", "1f2b", "1f1b"),
        ("parallel", "cp_comm_type", "p2", "p2p"),
        ("optim", "optimizer", "adma", "adam"),
        ("optim", "lr_decay_style", "inverse_sqrt", "inverse-square-root"),
        ("train", "attention_backend", "flesh", "flash"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest(section, field, name, suggestion):
    config = config_of("tiny", "--vocab-size 2048")
    config = replace(config, **{section: replace(getattr(config, section), **{field: name})})
    with pytest.raises(ConfigError, match=name) as caught:
        plan_run(config, 1, rank=0)
    assert suggestion in caught.value.fix


def test_all_unknown_names_are_in_one_error():
    config = config_of("tiny", "--vocab-size 2048 --optimizer adma --lr-decay-style cosin")
    with pytest.raises(ConfigErrors, match="2 mistakes"):
        check_names(config)


def test_an_unknown_name_is_no_setting_without_effect():
    config = config_of("tiny", "--vocab-size 2048 optim.lr_decay_style=wsd --lr-wsd-decay-iters 5")
    with pytest.raises(
        ConfigError, match="optim.lr_decay_style is 'wsd'.*write --lr-decay-style WSD"
    ):
        check_names(config)


def test_a_layout_that_does_not_fit_the_ranks_is_refused():
    with pytest.raises(TopologyError):
        plan_run(config_of("mixtral_8x7b", ""), 8, rank=0)


MOE = {"num_experts": 4, "moe_layer_freq": "2"}
SHORTCUT = MOE | {"moe_shortcut": True, "moe_shared_expert_intermediate_size": 32}
# name -> ranks, sizes, fields of the parallel section, fields of the model section
LAYOUTS = {
    "one rank": (1, {}, {}, {}),
    "dp": (2, {"strategy": "no_shard"}, {}, {}),
    "zero1": (
        3,
        {"strategy": "optim"},
        {"overlap_grad_reduce": True, "overlap_param_gather": True},
        {},
    ),
    "zero2": (3, {"strategy": "optim_grads"}, {"overlap_grad_reduce": True}, {}),
    "tp sp": (4, {"strategy": "optim", "tp": 2}, {"sequence_parallel": True}, {}),
    "tp 4, 2 kv heads": (4, {"tp": 4}, {}, {}),
    "pp tied": (4, {"strategy": "optim", "pp": 2}, {}, {}),
    "pp interleaved": (
        2,
        {"strategy": "optim", "pp": 2},
        {"pipeline_schedule": "interleaved", "num_virtual_stages_per_pipeline_rank": 2},
        {"num_layers": 4},
    ),
    "pp zb-h1": (
        4,
        {"strategy": "optim_grads", "pp": 2},
        {"pipeline_schedule": "zb-h1"},
        {"num_layers": 4},
    ),
    "pp zb-v tied": (
        2,
        {"strategy": "optim", "pp": 2, "vpp": 2, "schedule": "zb-v"},
        {},
        {"num_layers": 4},
    ),
    "cp ring": (4, {"strategy": "optim", "cp": 2}, {"cp_comm_type": "p2p"}, {}),
    "cp ring, two blocks a layer": (
        4,
        {"strategy": "optim", "cp": 2},
        {"cp_comm_type": "p2p"},
        SHORTCUT,
    ),
    "ep": (4, {"strategy": "optim_grads", "ep": 2}, {}, MOE),
    "tp pp ep etp": (8, {"strategy": "optim", "tp": 2, "pp": 2, "etp": 1, "ep": 2}, {}, MOE),
}
CORE, FULL = {"recompute_granularity": "selective"}, {"recompute_granularity": "full"}
# name -> ranks, cp_comm_type, fields of the memory section
RECOMPUTED = {
    "ring full": (2, "p2p", FULL),
    "ulysses core_attn": (2, "a2a", CORE),
    "ulysses block": (2, "a2a", FULL | {"recompute_method": "block", "recompute_num_layers": 1}),
    "all-gather core_attn": (2, "allgather", CORE),
}
# Groups whose traffic a plan predicts to the byte; ep and etp depend on the routing.
PREDICTED = (
    "dp_shard",
    "dp_replicate",
    "expert_dp_shard",
    "expert_dp_replicate",
    "embed",
    "pp",
    "cp",
)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_plan_equals_the_built_run(layout: str) -> None:
    ranks, sizes, parallel, model = LAYOUTS[layout]
    fields = {SHORT_NAMES[name]: value for name, value in sizes.items()} | parallel
    case = Case(steps=1).but(
        train={"micro_batch_size": 1, "global_batch_size": 12}, parallel=fields, model=model,
        precision={"params_dtype": "fp32" if "ep" in layout else "bf16"},
    )  # fmt: skip
    run_ranks(ranks, holds_what_is_planned, case, shares=True, **sizes)


def test_instances_share_the_sum_of_a_tied_embedding_by_what_each_of_them_updates() -> None:
    sizes = "--pipeline-model-parallel-size 2 --num-distributed-optimizer-instances 2"
    # an embedding that does not fill its bucket
    shape = "--vocab-size 1001 --make-vocab-size-divisible-by 1 --hidden-size 132 --kv-channels 32"
    tied = "--outer-dp-sharding-strategy optim --no-untie-embeddings-and-output-weights"
    config = config_of("tiny", f"{sizes} {shape} {tied}")
    plans = [plan_run(config, 8, rank=rank) for rank in range(8)]
    sent = [sent_bytes(plan).get(("embed", "all_reduce"), 0) for plan in plans]
    assert sum(sent) == 2 * 1001 * 132 * 4, "every element once at both ends, in fp32"
    assert len(set(sent)) > 1, "an embedding that fills all shards alike shows nothing"


@pytest.mark.parametrize("row", RECOMPUTED)
def test_a_plan_has_the_traffic_of_recomputed_attention(row: str) -> None:
    ranks, comm_type, memory = RECOMPUTED[row]
    case = Case(steps=1).but(
        train={"micro_batch_size": 1, "global_batch_size": 2},
        parallel={"context_parallel_size": 2, "cp_comm_type": comm_type},
        memory=memory,
    )
    run_ranks(ranks, holds_what_is_planned, case, shares=True, cp=2)


@pytest.mark.parametrize("sizes", [{"ep": 2}, {"ep": 2, "etp": 2}], ids=str)
def test_a_plan_has_the_traffic_of_evenly_routed_experts(sizes: dict[str, int]) -> None:
    """In layers with experts only; a forward that runs again sends its tokens again."""
    modules = {"recompute_modules": ["moe"]}
    cases = [
        Case(steps=1).but(
            train={"micro_batch_size": 1, "global_batch_size": 8},
            parallel={SHORT_NAMES[name]: value for name, value in sizes.items()},
            model=MOE | {"moe_router_force_load_balancing": True} | model,
            memory=memory,
        )
        for memory in ({}, CORE | modules, FULL)
        for model in ({}, {"moe_num_zero_experts": 4})
    ]
    run_ranks(4, experts_send_what_is_planned, cases, shares=True, **sizes)


def experts_send_what_is_planned(ctx: ParallelContext, cases: list[Case]) -> None:
    for case in cases:
        run = build_here(ctx, case)
        ctx.traffic.reset()
        train_step(run, run.batch_iterator.next())
        keys = [(group, op) for group in ("ep", "etp") for op in ("all_to_all", "all_gather")]
        sent = {key: num_bytes for key in keys if (num_bytes := ctx.traffic.bytes(*key))}
        assert sent == {
            key: num_bytes for key, num_bytes in sent_bytes(run.plan).items() if key in keys
        }


def holds_what_is_planned(ctx: ParallelContext, case: Case) -> None:
    run = build_here(ctx, case)
    plan = run.plan
    assert {name: group.spec for name, group in ctx.groups.items()} == plan.groups
    ctx.traffic.reset()
    batch = run.batch_iterator.next()
    assert batch is not None and len(batch.microbatches) == plan.num_microbatches
    train_step(run, batch)
    for stage in plan.stages:
        module = run.stages[stage.spec.index]
        shapes = {name: parameter.shape for name, parameter in module.named_parameters()}
        assert list(shapes) == [local.spec.name for local in stage.params]
        assert all(shapes[local.spec.name] == local.box.shape for local in stage.params)
    check_buffers(run)
    for dp in run.data_parallel:
        with dp.gathered():
            pass
    predicted = {
        key: num_bytes for key, num_bytes in sent_bytes(plan).items() if key[0] in PREDICTED
    }
    ops = ("all_reduce", "reduce_scatter", "all_gather", "p2p", "all_to_all")
    sent = {(group, op): ctx.traffic.bytes(group, op) for group in PREDICTED for op in ops}
    sent["pp", "all_reduce"] = 0  # statistics of routers are not predicted
    assert {key: num_bytes for key, num_bytes in sent.items() if num_bytes} == predicted


def check_buffers(run: Run) -> None:
    """Ranges of parameters in the flat buffers, and the bytes behind them."""
    wrappers, planned = run.data_parallel, run.plan.resident_bytes
    modules = [stage.module for stage in run.runnable.values() for _ in stage.callbacks]
    params, grads, opened = 0, 0, 0
    for dp, module, buffer in zip(wrappers, modules, run.plan.buffers, strict=True):
        parameters = dict(module.named_parameters())
        start = dp.param_buffer.data_ptr()
        for bucket in buffer.layout.buckets:
            for param in bucket.params:
                offset = (parameters[param.name].data_ptr() - start) // dp.param_buffer.itemsize
                assert (offset, offset + parameters[param.name].numel()) == (
                    param.start,
                    param.stop,
                )
        params += dp.param_buffer.nbytes
        grads += sum(nbytes(bucket.grads.shard for bucket in dp.buckets).values())
        memories = {each.grads._memory for each in dp.buckets if hasattr(each.grads, "_memory")}
        opened += sum(memory.tensor.nbytes for memory in memories)
    of_params = nbytes(dp.param_buffer for dp in wrappers)
    state = {
        key: size
        for key, size in nbytes(run.optimizer.allocated_tensors).items()
        if key not in of_params
    }
    assert (params, grads, sum(state.values())) == (
        planned.params,
        planned.grads,
        planned.optimizer,
    )
    assert opened == planned.grad_buckets


def nbytes(tensors) -> dict[int, int]:
    """Bytes of the storages of tensors by address."""
    return {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for t in tensors
        if isinstance(t, torch.Tensor)
    }


@pytest.mark.parametrize(
    ("settings", "num_readers"),
    [
        ("", 8),
        ("--reset-attention-mask", 16),
        ("--reset-position-ids", 16),
        ("--pipeline-model-parallel-size 2", 8),
    ],
)
def test_a_stage_between_the_first_and_the_last_reads_samples_for_documents_only(
    settings, num_readers
):
    # Given a replica of 4 stages (or 2) of 2 x 2 tensor- and context-parallel ranks,
    layout = (
        "--tensor-model-parallel-size 2 --context-parallel-size 2 --pipeline-model-parallel-size 4 --num-layers 8"
        " --vocab-size 512 --global-batch-size 4 --micro-batch-size 1"
    )
    config = config_of("tiny", f"{layout} {settings}")
    size, read = 4 * config.parallel.pipeline_model_parallel_size, Counter()

    class Counted(SyntheticDataset):
        def __getitem__(self, index):
            read[index] += 1
            return super().__getitem__(index)

    for rank in range(size):
        sampler = plan_run(config, size, rank=rank).sampler
        loader = GlobalBatchLoader(Counted(512, config.data.seq_length, 1), sampler=sampler)
        microbatches = next(loader)
        # then every rank has batches of equal shape, whose targets it counts as often as it reads
        # them.
        assert [batch.tokens.shape for batch in microbatches] == [(1, config.data.seq_length)] * 4
        assert sampler.readers_per_sample == num_readers
        is_read = sampler.unread_length is None
        assert (
            sum(batch.num_target_tokens for batch in microbatches)
            == 4 * config.data.seq_length * is_read
        )
    assert read == dict.fromkeys(range(4), num_readers)
