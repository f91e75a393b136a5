"""A schedule, attention backend, optimizer, family and so on are one row each from outside, a file
format and a kind of layer two.
"""

import json
import math
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nanotrain.attention import backends
from nanotrain.attention.backends import EVERYTHING, Ability, AttentionBackend
from nanotrain.attention.sdpa import DenseKernel, LayerKernels
from nanotrain.comm.autograd import gather_along
from nanotrain.comm.group import Group
from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.config.config import Config, OptimConfig
from nanotrain.config.model import ModelConfig
from nanotrain.config.schema import KEYS
from nanotrain.interop.hf.families import FAMILIES, load_families, model_from_hf
from nanotrain.model.context import LayerContext, ModelParallel
from nanotrain.model.parameters import Parameters
from nanotrain.model.sublayers import MIXER_MODULES, Sublayers
from nanotrain.model.transformer import RESIDUAL_MODULES, ResidualModules
from nanotrain.optim import OPTIMIZERS
from nanotrain.optim.lr import LR_DECAYS
from nanotrain.optim.rule import ParamRange, UpdateRule, UpdateStep
from nanotrain.parallel.cp import CORE_ATTENTIONS, SDPAttention
from nanotrain.parallel.cp.split import join_shards, local_chunks
from nanotrain.parallel.pp.actions import PipelineShape, Schedule, forward, full_backward
from nanotrain.parallel.pp.schedules import SCHEDULES
from nanotrain.parallel.tp.layers import ColumnParallelLinear, RowParallelLinear, column_parallel
from nanotrain.planner.operator_time import OperatorTimes
from nanotrain.planner.scenario import Scenario
from nanotrain.planner.step_time import predict_step
from nanotrain.prepare import chunks
from nanotrain.prepare.chunks import InputChunk, plan_chunks
from nanotrain.prepare.readers import READERS, DocumentReader
from nanotrain.spec.counts import flops_per_token
from nanotrain.spec.declaration import Declaration, LayerKind, Specs, nest, summed
from nanotrain.spec.kinds import MIXERS
from nanotrain.spec.layer_sizes import LayerSizes
from nanotrain.spec.operators import Gate, Operator, Operators, Saved
from nanotrain.spec.residuals import RESIDUALS
from nanotrain.spec.residuals.plain import declare_plain
from nanotrain.spec.residuals.plain import operators as plain_operators
from nanotrain.spec.residuals.residual import ResidualKind, Sublayer
from tests.harness import run_ranks
from tests.laws.compare import assert_alike
from tests.laws.worlds import LR, Case, Outcome, train_here
from tests.model.building import MODELS, build, randomize
from tests.planner.scenarios import llama
from tests.train.saved_tensors import config_of, kept_and_planned

CASE = Case(2)


def one_at_a_time(shape: PipelineShape) -> Schedule:
    """Each microbatch forward through all stages and backward again before the next one begins."""
    return Schedule(
        tuple(
            tuple(
                make(rank, m)
                for m in range(shape.num_microbatches)
                for make in (forward, full_backward)
            )
            for rank in range(shape.num_ranks)
        )
    )


class GatherEverything:
    """Core attention that gathers queries too, attends to full sequences, and keeps the local part."""

    def __init__(self, group: Group, kernels: LayerKernels) -> None:
        self.group, self.sdpa = group, SDPAttention(kernels)

    def plan_mask(
        self, segment_ids: Tensor | None, *, tokens: Tensor, window: int | None = None
    ) -> Any:
        full = tokens.repeat(1, self.group.size)
        return self.sdpa.plan_mask(segment_ids, tokens=full, window=window)

    def __call__(
        self, query: Tensor, *, key: Tensor, value: Tensor, mask: Any, scores: Any
    ) -> Tensor:
        query, key, value = (
            join_shards(gather_along(x[None], self.group, dim=0)) for x in (query, key, value)
        )
        full = self.sdpa(query, key=key, value=value, mask=mask, scores=scores)
        return local_chunks(full, index=self.group.index, size=self.group.size)


def descend(ranges: Sequence[ParamRange], step: UpdateStep) -> None:
    for part in ranges:
        # not finite in a skipped step, which changes nothing
        grad = torch.where(step.is_skipped, 0.0, part.grad)
        part.main_param.sub_(grad, alpha=step.lr_of(part))


def train_with_rows(ctx: ParallelContext, case: Case) -> Outcome:
    """Train on this rank after adding the rows."""
    SCHEDULES["one_at_a_time"] = one_at_a_time
    CORE_ATTENTIONS["gather_everything"] = GatherEverything
    OPTIMIZERS["sgd_of_mine"] = UpdateRule(state_names=lambda config: (), update=descend)
    LR_DECAYS["stairs"] = lambda curve, consumed: (
        curve.optim.lr / (1 + curve.decay_done(consumed) // 0.25)
    )
    return train_here(ctx, case)


@pytest.mark.parametrize(
    ("sizes", "fields"),
    [
        (
            {"pp": 2},
            {"parallel": {"pipeline_model_parallel_size": 2, "pipeline_schedule": "one_at_a_time"}},
        ),
        (
            {"cp": 2},
            {"parallel": {"context_parallel_size": 2, "cp_comm_type": "gather_everything"}},
        ),
        (
            {},
            {
                "optim": {
                    "optimizer": "sgd_of_mine",
                    "lr_decay_style": "stairs",
                    "lr_decay_iters": 4,
                },
                "parallel": {"data_parallel_sharding_strategy": "optim"},
            },
        ),
    ],
    ids=["schedule", "core attention", "optimizer and learning rate"],
)
def test_a_row_trains_as_one_rank_does(
    sizes: dict[str, int], fields: dict[str, dict[str, object]]
) -> None:
    optim = {"optim": fields["optim"]} if "optim" in fields else {}
    strategy = fields["parallel"].get("data_parallel_sharding_strategy", "no_shard")
    single = run_ranks(1, train_with_rows, CASE.but(**optim))
    outcomes = run_ranks(2, train_with_rows, CASE.but(**fields), strategy=strategy, **sizes)
    assert_alike(outcomes, single, row=str(fields), lr=LR)


def test_the_rule_in_the_docs_changes_nothing_in_a_skipped_step() -> None:
    page = (Path(__file__).parents[1] / "docs" / "optimizers.md").read_text(encoding="utf-8")
    code = re.search(r"    def descend.*?\n\n", page, flags=re.DOTALL)
    assert code is not None
    names: dict[str, Any] = {"torch": torch}
    exec(textwrap.dedent(code[0]), names)
    for gradient, expected in ((math.inf, 1.0), (math.nan, 1.0), (2.0, 0.8)):
        found_inf = torch.tensor(float(not math.isfinite(gradient)))
        step = UpdateStep(
            OptimConfig(),
            torch.ones(()),
            lr=0.1,
            decoupled_lr=0.1,
            weight_decay=0.0,
            found_inf=found_inf,
        )
        part = ParamRange(torch.ones(1), torch.tensor([gradient]), {}, weight_decay=False)
        for rule in (names["descend"], descend):
            main_param = part.main_param.clone()
            rule([replace(part, main_param=main_param)], step)
            assert main_param.item() == pytest.approx(expected)


class CountingKernel(DenseKernel):
    """Attention with a mask of all queries and keys, which counts its calls."""

    num_calls = 0

    def __call__(self, *args: Any, **options: Any) -> Tensor:
        self.num_calls += 1
        return super().__call__(*args, **options)


def train_with_a_backend(ctx: ParallelContext, case: Case) -> tuple[Outcome, int]:
    """Train on this rank with a backend of its own; also returns how often its kernel ran."""
    kernel = CountingKernel()
    row = AttentionBackend(
        "counting", "mine", lambda _: kernel, {"cpu": Ability(frozenset({"fp32"}), EVERYTHING)}
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backends, "BACKENDS", {row.name: row} | backends.BACKENDS)
        return train_here(ctx, case), kernel.num_calls


def test_an_attention_backend_is_chosen_and_trains_as_the_others() -> None:
    case = CASE.but(data={"reset_attention_mask": True})
    named = case.but(train={"attention_backend": "mine"})
    [(outcome, num_calls)] = run_ranks(1, train_with_a_backend, named)
    assert_alike([outcome], run_ranks(1, train_here, case), row="backend", lr=LR)
    assert num_calls > 0


class GatedUnit(nn.Module):
    """A token mixer that mixes no tokens: output(sigmoid(gate) * value)."""

    def __init__(
        self, model_config: ModelConfig, params: Parameters, *, parallel: ModelParallel, layer: int
    ) -> None:
        super().__init__()
        self.gate = ColumnParallelLinear(*params.linear("gate"), tensor_parallel=parallel.tp)
        self.value = ColumnParallelLinear(*params.linear("value"), tensor_parallel=parallel.tp)
        self.output = RowParallelLinear(*params.linear("output"), tensor_parallel=parallel.tp)

    def forward(self, hidden: Tensor, context: LayerContext) -> Tensor:
        gate, value = column_parallel(hidden, (self.gate, self.value))
        return self.output(gate.sigmoid() * value)


def declare_gated_unit(declare: Declaration) -> Specs:
    hidden = declare.shape.hidden_size
    projection = declare.column_linear(hidden, hidden)
    specs = nest("gate", projection) + nest("value", projection)
    return specs + nest("output", declare.row_linear(hidden, hidden))


def gated_unit_operators(s: LayerSizes) -> Operators:
    channels = s.shape.hidden_size // s.tp
    numel = s.tokens * channels
    factor = Saved(numel * s.itemsize)
    return [
        s.column({"gate": channels, "value": channels}, saves=(s.layer_input,)),
        Gate(name="gate", numel=numel, saves=(factor, factor)),
        s.row(channels, saves=(factor,)),
    ]


def add_gated_unit() -> None:
    """Add the rows of the kind, and its name where the configuration lists those."""
    entry = KEYS["model.linear_attention_type"]
    vars(entry)["choices"] = (*entry.choices, "gated_unit")
    MIXERS["gated_unit"] = LayerKind(declare_gated_unit, gated_unit_operators)
    MIXER_MODULES["gated_unit"] = GatedUnit


def with_gated_units(config: Config) -> Config:
    """A configuration whose layers are of the kind."""
    model = replace(config.model, linear_attention_type="gated_unit")  # type: ignore[arg-type]
    return replace(config, model=model)


def scenario_of_gated_units(num_ranks: int) -> Scenario:
    scenario = llama(num_ranks)
    return replace(scenario, config=with_gated_units(scenario.config))


def train_with_kind(ctx: ParallelContext, case: Case) -> Outcome:
    add_gated_unit()
    return train_here(ctx, case)


def bytes_with_kind(ctx: ParallelContext, config: Config) -> tuple[int, int]:
    add_gated_unit()
    return kept_and_planned(ctx, config)


@pytest.fixture
def gated_unit() -> Iterator[None]:
    """The rows of the kind, in this process."""
    add_gated_unit()
    yield
    del MIXERS["gated_unit"], MIXER_MODULES["gated_unit"]


def test_a_kind_of_layer_is_a_module_and_a_list_of_operators() -> None:
    case = CASE.but(model={"linear_attention_type": "gated_unit"})
    single = run_ranks(1, train_with_kind, case)
    sharded = case.but(parallel={"tensor_model_parallel_size": 2})
    outcomes = run_ranks(2, train_with_kind, sharded, tp=2)
    assert_alike(outcomes, single, row="kind", lr=LR)


def test_the_bytes_and_the_time_of_a_kind_follow_from_its_operators(gated_unit: None) -> None:
    config = config_of("--num-layers 1 --hidden-size 64 --seq-length 128 --micro-batch-size 2")
    ((counted, planned),) = run_ranks(1, bytes_with_kind, with_gated_units(config))
    assert planned == pytest.approx(counted, rel=0.03)
    scenario = scenario_of_gated_units(8)
    assert predict_step(scenario).total > 0
    attention = flops_per_token(llama(8).shape, 4096)
    assert 0 < flops_per_token(scenario.shape, 4096) < attention


class GatedBlock(Sublayers):
    """x + gate * attention(norm(x)), then x + gate * mlp(norm(x))."""

    def __init__(
        self, model_config: ModelConfig, params: Parameters, *, parallel: ModelParallel, layer: int
    ) -> None:
        super().__init__(model_config, params, parallel=parallel, layer=layer)
        self.gate = params["gate"]

    def forward(self, x: Tensor, context: LayerContext) -> Tensor:
        x = x + self.gate * self.attention_output(x, context)
        return x + self.gate * self.mlp_output(x, context)


def declare_gated(declare: Declaration, sublayers: Sequence[Sublayer], *, index: int) -> Specs:
    gate = declare.vector("gate", declare.shape.hidden_size, value=0.5)
    gates = summed([replace(gate, group="norms")], declare.sequence_axes)
    return gates + declare_plain(declare, sublayers, index=index)


def gated_operators(s: LayerSizes, sublayers: Sequence[Sublayer]) -> Operators:
    gate = Gate(
        name="gate", numel=s.outside * s.shape.hidden_size, saves=(Saved(s.outside * s.width),)
    )
    return [*plain_operators(s, sublayers), gate, gate]


def add_gated_residual() -> None:
    """Add the rows of the kind, and its name where the configuration lists those."""
    entry = KEYS["model.residual_type"]
    vars(entry)["choices"] = (*entry.choices, "gated")
    RESIDUALS["gated"] = ResidualKind(declare_gated, gated_operators)
    RESIDUAL_MODULES["gated"] = ResidualModules(GatedBlock)


def train_with_residual(ctx: ParallelContext, case: Case) -> Outcome:
    add_gated_residual()
    return train_here(ctx, case)


def bytes_with_residual(ctx: ParallelContext, config: Config) -> tuple[int, int]:
    add_gated_residual()
    return kept_and_planned(ctx, config)


def test_a_residual_connection_is_a_block_and_a_description() -> None:
    case = CASE.but(model={"residual_type": "gated"})
    single = run_ranks(1, train_with_residual, case)
    sharded = case.but(parallel={"tensor_model_parallel_size": 2, "sequence_parallel": True})
    outcomes = run_ranks(2, train_with_residual, sharded, tp=2)
    assert_alike(outcomes, single, row="residual", lr=LR)
    config = config_of("--num-layers 1 --hidden-size 64 --seq-length 128 --micro-batch-size 2")
    model = replace(config.model, residual_type="gated")  # type: ignore[arg-type]
    ((counted, planned),) = run_ranks(1, bytes_with_residual, replace(config, model=model))
    assert planned == pytest.approx(counted, rel=0.03)


def test_an_operator_without_a_time_is_not_planned_at_the_peak_of_the_device() -> None:
    class Unknown(Operator):
        """An operator of a class that the planner has no time for."""

    with pytest.raises(KeyError, match="Unknown"):
        OperatorTimes(llama(8)).parts([Unknown(name="unknown")])


def test_a_file_format_of_prepare_is_a_splitter_and_a_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        chunks.SPLITTERS, ".verse", lambda path, chunk_bytes: [InputChunk("verses", (str(path),))]
    )
    monkeypatch.setitem(
        READERS, "verses", lambda reader, chunk: Path(chunk.files[0]).read_text().split("\n\n")
    )
    (tmp_path / "poem.verse").write_text("one\n\ntwo")
    planned = plan_chunks([str(tmp_path)], subset=None, split="train")
    assert [text for chunk in planned for text in DocumentReader("text").read(chunk)] == [
        "one",
        "two",
    ]


@pytest.fixture
def registered_config() -> Iterator[None]:
    """The model_type `mine` in transformers, whose own class reads every config.json."""
    from transformers import AutoConfig, LlamaConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    class MineConfig(LlamaConfig):
        model_type = "mine"

    AutoConfig.register("mine", MineConfig)
    yield
    CONFIG_MAPPING._extra_content.pop("mine")


@pytest.mark.usefixtures("registered_config")
def test_a_family_is_read_and_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from nanotrain.interop.hf.export import export_weights

    (tmp_path / "mine.yaml").write_text(
        "families: {mine: {from: llama, architecture: MineForCausalLM}}"
    )
    monkeypatch.setitem(FAMILIES, "mine", load_families(tmp_path / "mine.yaml")["mine"])
    stage = randomize(build(MODELS["llama-untied"]))
    tensors = [(name, parameter.detach()) for name, parameter in stage.named_parameters()]
    export_weights(tmp_path / "out", stage.model_config, tensors=tensors, family="mine")
    raw = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (raw["model_type"], raw["architectures"]) == ("mine", ["MineForCausalLM"])
    assert model_from_hf(tmp_path / "out").num_layers == stage.model_config.num_layers
