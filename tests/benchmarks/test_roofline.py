"""The budget of a step counts the FLOPs of the plan, and the bytes of its gradients, optimizer and
communication.
"""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from nanotrain.attention.backends import installed_torch
from nanotrain.config.config import Config
from nanotrain.config.load import load
from nanotrain.config.schema import with_values
from nanotrain.plan.plan import Plan, plan_run
from nanotrain.plan.traffic import sent_bytes
from nanotrain.spec.counts import flops_per_token, num_parameters
from nanotrain.topology.groups import GroupSpec
from tests.planner.test_recipes import RECIPES

LENGTH, MICRO = 32, 2
SIZES = [
    "--num-layers=2",
    "--hidden-size=32",
    "--num-attention-heads=4",
    "--num-query-groups=2",
    "--vocab-size=384",
]
FLAGS = [*SIZES, f"--seq-length={LENGTH}", f"--micro-batch-size={MICRO}", "--mock-data", "--bf16"]


@pytest.fixture(scope="module")
def roofline() -> ModuleType:
    if installed_torch() < (2, 11):
        pytest.skip("torch 2.10 has no fp32 sums of 16-bit products on the meta device")
    path = Path(__file__).parents[2] / "benchmarks" / "roofline.py"
    spec = importlib.util.spec_from_file_location("roofline", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def plan_of(world_size: int, *flags: str) -> Plan:
    return plan_run(load([*FLAGS, *flags]).config, world_size, rank=0)


def test_flops_are_those_of_the_plan(roofline: ModuleType) -> None:
    plan = plan_of(1, "--global-batch-size=6")
    budget = roofline.budget_of(plan, roofline.CARDS["H100"])
    tokens = 3 * MICRO * LENGTH
    attention = (
        tokens * plan.shape.num_layers * plan.shape.num_heads * LENGTH * 2 * plan.shape.head_dim
    )
    # the plan counts no recomputed scores, the fused operator does: 7 products instead of 6
    assert budget.costs["attention"].flops == pytest.approx(3.5 * attention)
    assert (
        budget.costs["GEMM"].flops == tokens * flops_per_token(plan.shape, LENGTH) - 3 * attention
    )
    assert budget.costs["attention"].launches == 3 * 2 * plan.shape.num_layers
    assert budget.costs["loss"].num_bytes > 0 < budget.costs["elementwise"].num_bytes


def test_bytes_of_gradients_optimizer_and_communication(roofline: ModuleType) -> None:
    plan = plan_of(4, "--global-batch-size=16", "--use-distributed-optimizer")
    budget = roofline.budget_of(plan, roofline.CARDS["A100"], has_triton=False)
    numel, shard = (
        num_parameters(plan.shape),
        sum(b.layout.numel for b in plan.stages[0].buffers) // 4,
    )
    assert plan.num_microbatches == 2
    assert budget.costs["gradients"].num_bytes == numel * ((2 + 4) + (2 + 4 + 4))
    assert budget.costs["optimizer"].num_bytes == shard * 46
    assert budget.costs["communication"].num_bytes == sum(sent_bytes(plan).values()) > 0
    assert budget.costs["communication"].seconds == pytest.approx(
        sum(sent_bytes(plan).values()) / (300e9 * 0.75)
    )


def test_products_that_write_weight_gradients_leave_those_of_the_embedding_and_the_norms(
    roofline: ModuleType,
) -> None:
    flags = ["--global-batch-size=16", "--data-parallel-sharding-strategy"]
    plans = [plan_of(4, *flags, strategy) for strategy in ("optim_grads", "optim")]
    returned, written = (roofline.budget_of(plan, roofline.CARDS["H100"]) for plan in plans)
    params = plans[0].stages[0].params
    products = sum(
        p.box.numel
        for p in params
        if len(p.box.shape) == 2 and not p.spec.name.startswith("embedding.")
    )
    saved = returned.costs["gradients"].num_bytes - written.costs["gradients"].num_bytes
    assert saved == products * ((2 + 4) + (2 + 4 + 4)) > 0
    # of a product: no gradient in bf16, one in fp32, and what it is added to
    more = written.costs["GEMM"].num_bytes - returned.costs["GEMM"].num_bytes
    assert more == products * ((4 - 2) + (4 + 4 - 2))
    assert written.costs["GEMM"].launches == returned.costs["GEMM"].launches


def test_a_faster_memory_shortens_what_memory_bounds(roofline: ModuleType) -> None:
    slow, fast = (roofline.budget_of(plan_of(1), roofline.CARDS[card]) for card in ("H100", "H200"))
    assert fast.costs["elementwise"].seconds == pytest.approx(
        slow.costs["elementwise"].seconds * 3.35 / 4.8
    )
    assert fast.costs["elementwise"].num_bytes == slow.costs["elementwise"].num_bytes


def test_tensor_parallel_ranks_share_the_products_and_send_what_a_rank_of_a_run_sends(
    roofline: ModuleType,
) -> None:
    single = roofline.budget_of(plan_of(1, "--global-batch-size=6"), roofline.CARDS["H100"])
    tp = ["--global-batch-size=6", "--tensor-model-parallel-size=2"]
    for more in ([], ["--sequence-parallel"]):
        plan = plan_of(2, *tp, *more)
        budget = roofline.budget_of(plan, roofline.CARDS["H100"])
        assert budget.costs["GEMM"].flops == single.costs["GEMM"].flops / 2
        assert budget.costs["attention"].flops == single.costs["attention"].flops / 2
        # by the count of what ran: per layer 2 all-reduces (or gather and scatter) forward and 2
        # backward, and the ends
        # bytes of [B, S, H], of which half is sent per gather or scatter
        hidden = 2 * MICRO * LENGTH * 32
        sent = budget.traffic["tp"].num_bytes / 3
        # with sequence parallelism the input of two regions per layer is gathered again for its
        # weight gradient
        per_layer = 4 * hidden + (hidden if more else 0)
        assert 2 * per_layer < sent < 2 * per_layer + 4 * hidden
    assert set(budget.traffic) == {"tp"}


EXPERTS = [
    "--num-experts=4",
    "--moe-router-topk=2",
    "--moe-ffn-hidden-size=48",
    "--global-batch-size=4",
]


def test_products_of_experts_are_those_of_the_plan_and_of_the_router(roofline: ModuleType) -> None:
    plan = plan_of(1, *EXPERTS)
    budget, tokens = roofline.budget_of(plan, roofline.CARDS["H100"]), 2 * MICRO * LENGTH
    attention = (
        tokens * plan.shape.num_layers * plan.shape.num_heads * LENGTH * 2 * plan.shape.head_dim
    )
    # which the plan leaves out; the fp32 gradient is multiplied as two matrices in bf16
    routers = (2 + 4 * 2) * tokens * plan.shape.num_layers * plan.shape.hidden_size * 4
    assert (
        budget.costs["GEMM"].flops
        == tokens * flops_per_token(plan.shape, LENGTH) - 3 * attention + routers
    )


@pytest.mark.parametrize(
    "layout",
    [
        [],  # the matrices of every expert in halves
        [
            "--expert-tensor-parallel-size=1",
            "--expert-model-parallel-size=2",
            "--sequence-parallel",
        ],
    ],
)
def test_ranks_share_the_products_of_experts(roofline: ModuleType, layout: list[str]) -> None:
    single = roofline.budget_of(plan_of(1, *EXPERTS), roofline.CARDS["H100"])
    plan = plan_of(2, *EXPERTS, "--tensor-model-parallel-size=2", *layout)
    budget = roofline.budget_of(plan, roofline.CARDS["H100"])
    assert budget.costs["GEMM"].flops == single.costs["GEMM"].flops / 2
    planned = {
        name: sum(sent for (group, _), sent in sent_bytes(plan).items() if group == name)
        for name in ("ep", "etp")
    }
    assert {name: budget.traffic[name].num_bytes for name in planned} == planned and sum(
        planned.values()
    ) > 0
    assert budget.traffic["tp"].num_bytes > 0


def test_a_layer_of_experts_has_few_operators(roofline: ModuleType) -> None:
    flags = [
        "--num-experts=8",
        "--moe-router-topk=4",
        "--swiglu",
        "--moe-ffn-hidden-size=48",
        "--global-batch-size=8",
    ]
    flags += ["--moe-shared-expert-intermediate-size=48", "--moe-router-score-function=sigmoid"]
    flags += [
        "--moe-router-num-groups=4",
        "--moe-router-group-topk=2",
        "--moe-router-enable-expert-bias",
    ]
    for ranks in (1, 2):
        plan = plan_of(ranks, *flags, f"--expert-model-parallel-size={ranks}")
        fused, plain = (
            roofline.moe_layer(plan, roofline.CARDS["H100"], has_triton=has)
            for has in (True, False)
        )
        assert int(fused.split()[0]) <= 110 < int(plain.split()[0])


def test_recomputed_layers_run_again(roofline: ModuleType) -> None:
    flags = [
        "--recompute-granularity=full",
        "--recompute-method=uniform",
        "--recompute-num-layers=1",
    ]
    plain, again = (
        roofline.budget_of(plan_of(1, *more), roofline.CARDS["H100"]) for more in ([], flags)
    )
    # all products of the layers but the last of each, whose output nothing in the backward reads
    names = (
        "query.weight",
        "key.weight",
        "value.weight",
        "output.weight",
        "gate.weight",
        "up.weight",
    )
    params = [param for param in plan_of(1).stages[0].params if param.spec.name.endswith(names)]
    repeated = 2 * MICRO * LENGTH * sum(param.box.numel for param in params)
    assert again.costs["GEMM"].flops == plain.costs["GEMM"].flops + repeated
    assert again.costs["attention"].flops == pytest.approx(
        plain.costs["attention"].flops * 4.5 / 3.5
    )


def test_the_kernels_of_the_loss_move_fewer_bytes_than_the_operators_that_they_stand_for(
    roofline: ModuleType,
) -> None:
    plan = plan_of(1, "--vocab-size=4096")
    fused, plain = (
        roofline.budget_of(plan, roofline.CARDS["H100"], has_triton=has) for has in (True, False)
    )
    assert fused.costs["loss"].num_bytes < plain.costs["loss"].num_bytes / 3
    assert fused.costs["GEMM"].flops == plain.costs["GEMM"].flops


def test_a_layout_that_does_not_fit_is_one_message(
    roofline: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        roofline.main(
            ["--world-size", "3", "+config=tiny", *FLAGS, "--tensor-model-parallel-size=2"]
        )
    assert "error: 3 ranks" in capsys.readouterr().err


def test_context_and_pipeline_ranks_share_the_layers_and_wait(roofline: ModuleType) -> None:
    single = roofline.budget_of(plan_of(1, "--global-batch-size=8"), roofline.CARDS["H100"])
    flags = [
        "--global-batch-size=8",
        "--context-parallel-size=2",
        "--pipeline-model-parallel-size=2",
    ]
    ranks = [plan_run(load([*FLAGS, *flags]).config, 4, rank=rank) for rank in (0, 3)]
    first, last = (roofline.budget_of(plan, roofline.CARDS["H100"]) for plan in ranks)
    for name in ("GEMM", "attention"):
        together = first.costs[name].flops + last.costs[name].flops
        assert together == pytest.approx(single.costs[name].flops / 2), name
    assert first.costs["loss"].num_bytes == 0 < last.costs["loss"].num_bytes
    sent = {name: 0 for name, _ in sent_bytes(ranks[0])}
    for (name, _), num_bytes in sent_bytes(ranks[0]).items():
        sent[name] += num_bytes
    assert {name: cost.num_bytes for name, cost in first.traffic.items()} == sent and {
        "cp",
        "pp",
    } <= sent.keys()
    computed = sum(
        first.costs[name].seconds
        for name in ("GEMM", "attention", "elementwise", "loss", "gradients")
    )
    assert first.costs["bubble"].seconds == pytest.approx(computed * 1 / 4)  # (p - 1) / m


def test_a_group_of_several_nodes_sends_over_the_network(roofline: ModuleType) -> None:
    budget = roofline.Budget(roofline.CARDS["H100"], "bf16")
    budget.send(GroupSpec("tp", (6, 7), 0), 50e9)
    budget.send(GroupSpec("dp", (7, 8), 0), 50e9)
    assert budget.traffic["tp"].seconds == pytest.approx(1 / 9 / 0.75)
    assert budget.traffic["dp"].seconds == pytest.approx(1 / 0.75)


def shortened(config: Config, world_size: int) -> Config:
    """One layer per virtual stage, but what the first and last stage have on purpose, and few
    microbatches.
    """
    parallel, moe = config.parallel, config.model.moe
    pp = parallel.pipeline_model_parallel_size
    ends = [parallel.decoder_first_pipeline_num_layers, parallel.decoder_last_pipeline_num_layers]
    given = [number for number in ends if number]
    num_layers = sum(given) + pp * parallel.num_virtual_stages_per_pipeline_rank - len(given)
    batch = parallel.data_parallel_size(world_size) * pp * config.train.micro_batch_size
    values = {"model.num_layers": num_layers, "train.global_batch_size": batch}
    if moe is not None and "*" in moe.layer_freq:
        values["model.moe.layer_freq"] = f"[0]*3+[1]*{num_layers - 3}" if num_layers > 3 else "1"
    if "[" in config.model.linear_attention_freq:
        values["model.linear_attention_freq"] = "4"
    return with_values(config, values)


@pytest.mark.parametrize("recipe", sorted(RECIPES))
def test_every_recipe_has_a_budget_of_its_slowest_stage(roofline: ModuleType, recipe: str) -> None:
    world_size = RECIPES[recipe][-1]
    # a block of queries at a time, in torch
    flags = ["--seq-length", "1024"] if recipe == "deepseek_v32" else []
    config = shortened(
        load([f"+config={recipe}", "--mock-data", *flags], to_train=False).config, world_size
    )
    plan, budget = roofline.slowest(config, world_size, card=roofline.CARDS["H100"])
    first = (
        budget
        if plan.rank == 0
        else roofline.budget_of(plan_run(config, world_size, rank=0), roofline.CARDS["H100"])
    )
    assert budget.seconds >= first.seconds > 0
    dims = (plan.shape.head_dim, plan.shape.value_head_dim)
    has_cudnn = dims == (192, 128) or max(dims) <= 128
    assert roofline.attention_kernel(plan, roofline.CARDS["H100"]) == (
        "cudnn" if has_cudnn else "sdpa flash"
    )
    assert roofline.attention_kernel(plan, roofline.CARDS["A100"]) == "sdpa flash"
    if recipe == "deepseek_v3":  # dense layers take less than experts
        assert any(map(plan.shape.has_experts, plan.stages[0].spec.layers))


def test_the_program_prints_a_table(
    roofline: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    roofline.main(["--card", "H200", "+config=tiny", *FLAGS, "--fp8"])
    out = capsys.readouterr().out
    assert all(f"| {name} |" in out for name in roofline.CLASSES) and "MFU" in out


def test_fp8_pays_with_kernels_that_cast(roofline: ModuleType) -> None:
    """Of llama3_8b with a quarter of its layers; by torch's operators, fp8 was slower than bf16."""
    flags, card = ["+config=llama3_8b", "--mock-data", "--num-layers", "8"], roofline.CARDS["H100"]
    bf16, fp8 = (plan_run(load([*flags, *more]).config, 8, rank=0) for more in ([], ["--fp8"]))
    seconds = roofline.budget_of(bf16, card).seconds
    by_torch, by_kernels = (
        seconds / roofline.budget_of(fp8, card, is_fused=flag).seconds for flag in (False, True)
    )
    assert by_torch < 0.95 and by_kernels > 1.15, (by_torch, by_kernels)
