"""A schedule, attention backend, optimizer, family and so on are one row each from outside, a file
format two.
"""

import json
import math
import re
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nanotrain.attention import backends
from nanotrain.attention.backends import EVERYTHING, Ability, AttentionBackend
from nanotrain.attention.sdpa import DenseKernel, LayerKernels
from nanotrain.comm.autograd import gather_along
from nanotrain.comm.group import Group
from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.config.config import OptimConfig
from nanotrain.interop.hf.families import FAMILIES, load_families, model_from_hf
from nanotrain.optim import OPTIMIZERS
from nanotrain.optim.lr import LR_DECAYS
from nanotrain.optim.rule import ParamRange, UpdateRule, UpdateStep
from nanotrain.parallel.cp import CORE_ATTENTIONS, SDPAttention
from nanotrain.parallel.cp.split import join_shards, local_chunks
from nanotrain.parallel.pp.actions import PipelineShape, Schedule, forward, full_backward
from nanotrain.parallel.pp.schedules import SCHEDULES
from nanotrain.prepare import chunks
from nanotrain.prepare.chunks import InputChunk, plan_chunks
from nanotrain.prepare.readers import READERS, DocumentReader
from tests.harness import run_ranks
from tests.laws.compare import assert_alike
from tests.laws.worlds import LR, Case, Outcome, train_here
from tests.model.building import MODELS, build, randomize

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
