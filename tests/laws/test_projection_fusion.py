"""Laws L1 and L7 for `--projection-fusion`: one product of query, key and value, and of gate and up.

Every layout trains as one rank with a product per weight does. Buckets close between some of the weights, and biases
lie between others, so that in each row some groups are joined and others stay apart; both counts are held.
"""

from typing import Any, NamedTuple

from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.kernels.joined import JoinedWeight
from nanotrain.parallel.tp.layers import ColumnParallelLinears
from nanotrain.topology.topology import Topology
from nanotrain.train.run import Run
from tests.harness import SHORT_NAMES, parallel_config, run_ranks
from tests.laws.compare import OPTIM, STEPS, assert_alike
from tests.laws.worlds import GLOBAL_BATCH, Case, Outcome, build_here, micro_batch_size, outcome_of, train_steps

# Weights that fill multiples of 64 elements on one and on two tp ranks, beside norms that do not.
SIZES = {"hidden_size": 40, "ffn_hidden_size": 80, "kv_channels": 16, "num_attention_heads": 8, "num_query_groups": 4}
MODELS: dict[str, dict[str, Any]] = {
    "llama": SIZES | {"num_layers": 2},
    "biased": SIZES | {"num_layers": 2, "add_qkv_bias": True, "qk_layernorm": True},
}
SP = {"sequence_parallel": True}
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
ZB = {"pipeline_schedule": "zb-h1"}
RETURNED = {"gradient_accumulation_fusion": False}  # autograd returns the weight gradients
FULL = {"recompute_granularity": "full"}
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ["mlp"]}


class Row(NamedTuple):
    """A layout of two ranks."""

    model: str
    sizes: dict[str, Any]
    bucket_size: int  # a border lies inside of a group of the rank, with optim_grads_params of every layer
    groups: tuple[int, int]  # of the rank, and how many of them are joined
    options: dict[str, Any] = {}
    memory: dict[str, Any] = {}

    @property
    def case(self) -> Case:
        """Three steps of three microbatches."""
        parallel = {SHORT_NAMES[name]: value for name, value in self.sizes.items()} | self.options
        return Case(STEPS).but(
            model=MODELS[self.model],
            parallel=parallel | {"projection_fusion": True, "ddp_bucket_size": self.bucket_size},
            train={"micro_batch_size": micro_batch_size(2, self.sizes)},
            optim=OPTIM,
            memory=self.memory,
        )


ROWS = [
    Row("llama", {"tp": 2, "strategy": "optim"}, 9000, (4, 3), SP | OVERLAP),
    Row("biased", {"tp": 2, "strategy": "no_shard"}, 9000, (4, 2), RETURNED),
    Row("llama", {"pp": 2, "strategy": "optim"}, 16000, (2, 1), memory=SELECTIVE),
    Row("biased", {"pp": 2, "strategy": "optim_grads"}, 16000, (2, 1), ZB | OVERLAP),
    Row("llama", {"cp": 2, "strategy": "no_shard"}, 12000, (4, 3)),
    Row("llama", {"strategy": "optim_grads"}, 12000, (4, 3), OVERLAP),
    Row("llama", {"strategy": "optim_grads_params"}, 16000, (4, 2), OVERLAP, FULL),
    Row("biased", {"strategy": "optim"}, 16000, (4, 2), RETURNED, FULL),
]


def groups_of(run: Run) -> list[JoinedWeight | None]:
    """The joined weights of this rank; None for a group that stays apart."""
    modules = [module for stage in run.stages.values() for module in stage.modules()]
    return [module.joined for module in modules if isinstance(module, ColumnParallelLinears)]


def train_joined(ctx: ParallelContext, rows: list[Row]) -> list[tuple[Outcome, int, int]]:
    """Train every row on the ranks of one world; its groups of layers that share an input, and how many are joined."""
    outcomes = []
    for row in rows:
        run = build_here(ParallelContext.attach(Topology.of(parallel_config(**row.sizes), 2)), row.case)
        outcome, groups = outcome_of(run, train_steps(run, STEPS)), groups_of(run)
        outcomes.append((outcome, len(groups), sum(group is not None for group in groups)))
    return outcomes


def single_rank(model: str) -> list[Outcome]:
    """One rank with a product per weight."""
    case = Case(STEPS).but(model=MODELS[model], train={"micro_batch_size": GLOBAL_BATCH}, optim=OPTIM)
    run = build_here(ParallelContext.attach(Topology.of(parallel_config(), 1)), case)
    assert groups_of(run) == [None] * 4, "off on CPUs"
    return [outcome_of(run, train_steps(run, STEPS))]


def test_every_layout_trains_as_one_rank_with_a_product_per_weight() -> None:
    references = {model: single_rank(model) for model in MODELS}
    by_rank = run_ranks(2, train_joined, ROWS)
    for row, ranks in zip(ROWS, zip(*by_rank, strict=True), strict=True):
        assert_alike([outcome for outcome, *_ in ranks], references[row.model], row=str(row), lr=OPTIM["lr"])
        for _, num_groups, num_joined in ranks:
            assert (num_groups, num_joined) == row.groups, row
