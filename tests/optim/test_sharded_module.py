"""Any module on several ranks trains as with torch's AdamW on one, under every strategy;
checkpoints load in all.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.config.config import OptimConfig, PrecisionConfig
from nanotrain.errors import ConfigError
from nanotrain.optim.sharded_module import ShardedModule, find_units
from tests.harness import parallel_config, run_ranks

OPTIM = OptimConfig(lr=1e-2, weight_decay=0.1, adam_beta2=0.95, adam_eps=1e-5, clip_grad=0.5)
STEPS, SAMPLES, LENGTH = 3, 8, 12
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
# name -> ranks, options of ParallelConfig
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "optim": (2, {"strategy": "optim"}),
    "optim_grads": (2, {"strategy": "optim_grads", **OVERLAP}),
    "optim_grads_params": (2, {"strategy": "optim_grads_params"}),
    "no_shard on 4": (4, {"strategy": "no_shard"}),
    "optim_grads_params on 4, overlap": (4, {"strategy": "optim_grads_params", **OVERLAP}),
    "units kept until their backward": (
        2,
        {"strategy": "optim_grads_params", "reshard_after_forward": False},
    ),
    "fixed memory, mean in the collective": (
        2,
        {
            "strategy": "optim_grads_params",
            "fsdp_double_buffer": True,
            "ddp_average_in_collective": True,
        },
    ),
    "two instances": (4, {"strategy": "optim_grads_params", "instances": 2}),
    "two instances, state sharded across": (
        4,
        {"strategy": "optim_grads", "instances": 2, "outer_dp_sharding_strategy": "optim"},
    ),
}


class Block(nn.Module):
    """Returns two tensors, both of which need a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(24),
            nn.Linear(24, 40),
            nn.Linear(40, 24, bias=False),
        )

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        inner = F.gelu(self.up(self.norm(hidden)))
        return hidden + self.down(inner), inner.square().mean()


class Model(nn.Module):
    """Predicts the next token from the one before it; the head may share the embedding's weight."""

    def __init__(self, *, tied: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(50, 24)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm, self.head = nn.LayerNorm(24), nn.Linear(24, 50, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, penalty = self.embedding(tokens), torch.zeros(())
        for block in self.blocks:
            hidden, part = block(hidden)
            penalty = penalty + part
        logits = self.head(self.norm(hidden))[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()) + 0.01 * penalty


def tokens_of(step: int) -> Tensor:
    return torch.randint(0, 50, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(step))


def reference() -> dict[str, Tensor]:
    """Weights after AdamW on one rank, plain torch."""
    model = Model()
    matrices = [param for param in model.parameters() if param.dim() >= 2]
    vectors = [param for param in model.parameters() if param.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-5)
    for step in range(STEPS):
        optimizer.zero_grad()
        tokens = tokens_of(step)
        model(tokens).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return {name: param.detach() for name, param in model.named_parameters()}


def options_of(layout: str) -> dict[str, Any]:
    """With buckets small enough that every strategy has several, and padding in them."""
    return LAYOUTS[layout][1] | {"ddp_bucket_size": 3000}


def shard(model: nn.Module, context: ParallelContext, layout: str) -> ShardedModule:
    options = {"parallel": parallel_config(**options_of(layout)), "optim": OPTIM}
    return ShardedModule(model, context, unit_classes=(Block,), **options)


def train(sharded: ShardedModule, context: ParallelContext, steps: range) -> None:
    """Two microbatches per rank and step."""
    dp, size = context.group("dp"), context.group("dp").size
    for step in steps:
        for number, tokens in enumerate(tokens_of(step).chunk(2 * size)[dp.index :: size]):
            loss = sharded.module(tokens) / 2
            sharded.backward(loss, is_last=number == 1)
        sharded.step()


def weights_of(sharded: ShardedModule) -> dict[str, Tensor]:
    with sharded.data_parallel.gathered():
        return {name: param.detach().clone() for name, param in sharded.module.named_parameters()}


def train_and_save(
    context: ParallelContext, model: nn.Module, layout: str, folder: Path
) -> dict[str, Tensor]:
    sharded = shard(model, context, layout)
    assert len(sharded.data_parallel.buckets) > 2
    train(sharded, context, range(STEPS))
    sharded.save(folder, step=STEPS)
    return weights_of(sharded)


def load_and_train(
    context: ParallelContext, layout: str, checkpoint: Path
) -> tuple[dict[str, Tensor], Tensor]:
    model = Model()
    for param in model.parameters():
        param.data.zero_()
    sharded = shard(model, context, layout)
    assert sharded.load(checkpoint) == STEPS
    loaded = weights_of(sharded)
    train(sharded, context, range(STEPS, STEPS + 1))
    return loaded, weights_of(sharded)["norm.weight"]


@pytest.fixture(scope="module")
def expected() -> dict[str, Tensor]:
    return reference()


@pytest.fixture(scope="module")
def saved(
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, tuple[Path, list[dict[str, Tensor]]]]:
    results = {}
    for layout, (ranks, _) in LAYOUTS.items():
        folder = tmp_path_factory.mktemp("sharded")
        arguments = (Model(), layout, folder)  # threads would draw its weights from one generator
        results[layout] = (
            folder,
            run_ranks(ranks, train_and_save, *arguments, shares=True, **options_of(layout)),
        )
    return results


@pytest.mark.parametrize("page", ["zero.md", "status.md"])
def test_the_number_of_layouts_in_the_docs(page: str) -> None:
    text = (Path(__file__).parents[2] / "docs" / page).read_text()
    assert len(LAYOUTS) == 9 and "nine layouts" in text.replace("\n", " ").lower()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_equals_torch_on_one_rank(
    saved: Any, expected: dict[str, Tensor], layout: str
) -> None:
    by_rank = saved[layout][1]
    assert by_rank[0].keys() == expected.keys() and "head.weight" not in expected, (
        "tied to the embedding"
    )
    for name, value in expected.items():
        torch.testing.assert_close(by_rank[0][name], value, rtol=1e-4, atol=2e-6)
        assert all(torch.equal(weights[name], by_rank[0][name]) for weights in by_rank), name


def test_a_checkpoint_loads_in_another_strategy_and_number_of_ranks(saved: Any) -> None:
    folder, by_rank = saved["optim_grads_params on 4, overlap"]
    checkpoint = folder / f"step-{STEPS:08d}"
    results = []
    for layout in ("optim", "two instances"):
        for loaded, updated in run_ranks(
            LAYOUTS[layout][0],
            load_and_train,
            layout,
            checkpoint,
            shares=True,
            **options_of(layout),
        ):
            assert all(torch.equal(loaded[name], value) for name, value in by_rank[0].items())
            results.append(updated)
    # The moments were loaded too: the next step is the same everywhere.
    for updated in results[1:]:
        torch.testing.assert_close(updated, results[0], rtol=1e-5, atol=1e-7)


def test_units_are_the_blocks_and_every_other_module_with_parameters() -> None:
    names = [name for name, _ in find_units(Model(tied=False), (Block,))]
    blocks = [f"blocks.{i}" for i in range(3)]
    assert names == ["embedding", *blocks, "norm", "head"]


def test_mistakes_are_one_error() -> None:
    with pytest.raises(ConfigError, match=r"no module of the unit classes \(LSTM\).*Block"):
        find_units(Model(), (nn.LSTM,))
    outer = nn.Sequential(nn.Linear(2, 2))
    outer.scale = nn.Parameter(torch.ones(2))
    with pytest.raises(ConfigError, match="Sequential has parameters of its own"):
        find_units(outer, (nn.Linear,))
    assert len(find_units(outer, (nn.Linear,), must_not_nest=False)) == 2
    # The fix of that message: the root is one unit, with everything in it.
    assert [name for name, _ in find_units(outer, (nn.Linear, nn.Sequential))] == [""]


def refuse_misuse(context: ParallelContext) -> None:
    parallel, units = parallel_config(strategy="optim_grads"), (Block,)
    frozen = Model()
    frozen.embedding.requires_grad_(False)
    with pytest.raises(ConfigError, match="1 parameter is frozen, the first is embedding.weight"):
        ShardedModule(frozen, context, parallel=parallel, unit_classes=units)
    decoupled = OptimConfig(decoupled_lr=0.1)
    with pytest.raises(ConfigError, match="decoupled_lr has no effect"):
        ShardedModule(Model(), context, parallel=parallel, unit_classes=units, optim=decoupled)
    sparse = Model(tied=False)
    sparse.embedding = nn.Embedding(50, 24, sparse=True)
    with pytest.raises(
        ConfigError, match="embedding has sparse gradients: .*; build it with sparse=False"
    ):
        ShardedModule(sparse, context, parallel=parallel, unit_classes=units)
    sharded = ShardedModule(Model(), context, parallel=parallel, unit_classes=units)
    with pytest.raises(RuntimeError, match="step before the last microbatch"):
        sharded.step()
    sharded.backward(sharded.module(tokens_of(0)))
    with pytest.raises(RuntimeError, match="backward after the last microbatch"):
        sharded.backward(sharded.module(tokens_of(0)))


class Aliased(Model):
    """Reads the weight of its head through a reference that is no registered name."""

    def __init__(self) -> None:
        super().__init__(tied=False)
        self.weights = [self.head.weight]
        self.head.forward = lambda hidden: F.linear(hidden, self.weights[0])  # type: ignore[method-assign]


def keep_references(context: ParallelContext, strategy: str, dtype: str) -> None:
    model, parallel = Aliased(), parallel_config(strategy=strategy)
    precision = PrecisionConfig(params_dtype=dtype)
    sharded = ShardedModule(
        model, context, parallel=parallel, unit_classes=(Block,), precision=precision
    )
    before = weights_of(sharded)["head.weight"]
    sharded.backward(model(tokens_of(0)))
    sharded.step()
    assert model.weights[0] is model.head.weight and model.head.weight.dtype is before.dtype
    assert not torch.equal(weights_of(sharded)["head.weight"], before)


@pytest.mark.parametrize(
    ("strategy", "dtype"),
    [
        ("no_shard", "fp32"),
        ("optim", "bf16"),
        ("optim_grads", "fp32"),
        ("optim_grads_params", "bf16"),
    ],
)
def test_references_to_a_parameter_stay_valid(strategy: str, dtype: str) -> None:
    run_ranks(1, keep_references, strategy, dtype, strategy=strategy)


def test_frozen_parameters_and_wrong_order_are_refused() -> None:
    run_ranks(1, refuse_misuse)


def muon_matrices(context: ParallelContext) -> list[str]:
    model = Model()
    for block in model.blocks:
        # a block with a parameter of its own is a block still
        block.scale = nn.Parameter(torch.ones(24))
    parallel = parallel_config(strategy="optim_grads_params")
    sharded = ShardedModule(model, context, parallel=parallel, unit_classes=(Block,))
    return [
        name
        for name, local in sharded.data_parallel.params.items()
        if local.spec.needs_whole_matrix
    ]


def test_the_matrices_of_blocks_are_those_that_muon_updates() -> None:
    (names,) = run_ranks(1, muon_matrices)
    assert names == [f"blocks.{i}.{layer}.weight" for i in range(3) for layer in ("up", "down")]


def refuse_tensor_parallelism(context: ParallelContext) -> None:
    parallel = replace(parallel_config(tp=2), data_parallel_sharding_strategy="no_shard")
    with pytest.raises(ConfigError, match="a sharded module with tp 2"):
        ShardedModule(Model(), context, parallel=parallel, unit_classes=(Block,))


def refuse_another_strategy(context: ParallelContext) -> None:
    with pytest.raises(
        ConfigError, match="no_shard in a context whose ranks form shard groups of 2"
    ):
        ShardedModule(
            Model(), context, parallel=parallel_config(strategy="no_shard"), unit_classes=(Block,)
        )


def test_a_context_of_another_strategy_is_refused() -> None:
    run_ranks(2, refuse_another_strategy, strategy="optim")


def test_model_parallelism_is_refused() -> None:
    run_ranks(2, refuse_tensor_parallelism, tp=2)
