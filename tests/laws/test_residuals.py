"""Laws L1 to L7 for kinds of residual connections, in the layouts of test_layer_kinds.py."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.harness import run_ranks
from tests.laws.compare import assert_alike
from tests.laws.more_layouts import with_mark
from tests.laws.test_layer_kinds import (
    DOCUMENTS,
    LAYOUTS,
    MORE_LAYOUTS,
    MORE_WIDER,
    WIDER,
    KindLayout,
)
from tests.laws.test_model_features import (
    EXPERTS,
    OPTIM,
    Trained,
    assert_equal_to_one_rank,
    name_of,
    train_in_every_way,
)
from tests.laws.worlds import Case, train_cases

# two layers each, or four that are half ones
MODELS: dict[str, dict[str, Any]] = {
    "side by side, one norm": EXPERTS
    | {
        "residual_type": "parallel",
        "parallel_shared_norm": True,
        "normalization": "LayerNorm",
        "layernorm_parameters": "weight",
        "add_qkv_bias": True,
        "add_mlp_bias": True,
        "add_head_bias": True,
        "moe_layer_freq": "2",
        "hidden_dropout": 0.1,
    },
    "side by side, two norms": {
        "residual_type": "parallel",
        "normalization": "LayerNorm",
        "add_bias_linear": True,
        "add_head_bias": True,
        "untie_embeddings_and_output_weights": True,
        "activation": "gelu",
        "mtp_num_layers": 1,
    },
    "gated": {
        "residual_type": "gated",
        "residual_gate_temperature": 0.5,
        "norm_placement": "sandwich",
        "mtp_num_layers": 1,
        "hidden_dropout": 0.1,
    },
    "streams, doubly stochastic": EXPERTS
    | {
        "residual_type": "mhc",
        "residual_streams": 3,
        "mhc_sinkhorn_iterations": 4,
        "moe_layer_freq": "2",
        "hidden_dropout": 0.1,
        "norm_placement": "sandwich",
    },
    "blocks by attention": EXPERTS
    | {
        "residual_type": "attention",
        "residual_streams": 3,
        "moe_layer_freq": "2",
        "hidden_dropout": 0.1,
        "untie_embeddings_and_output_weights": True,
    },
    "streams of half layers": EXPERTS
    | {
        "num_layers": 4,
        "hybrid_layer_pattern": "*-*E",
        "residual_type": "hyper_connections",
        "residual_streams": 2,
        "residual_multiplier": 0.8,
        "untie_embeddings_and_output_weights": True,
    },
}
# for pipelines: four layers each
DEEP = {
    name if "num_layers" in fields else f"{name}, four layers": {"num_layers": 4} | fields
    for name, fields in MODELS.items()
}
ALL = MODELS | DEEP
BATCH = {"global_batch": 4}


class ResidualLayout(KindLayout):
    """A layout that trains models of `ALL` on samples with documents."""

    def case(self, model: str) -> Case:
        return super(KindLayout, self).case(model).but(model=ALL[model], data=DOCUMENTS)


def with_residuals(layout: KindLayout) -> ResidualLayout:
    """A layout of other kinds with the models of this file."""
    models = tuple(DEEP if "pp" in layout.sizes else MODELS)
    fields = {name: getattr(layout, name) for name in vars(layout)}
    return ResidualLayout(**fields | {"models": models})


def rows_of(layouts: list[KindLayout], more: list[KindLayout]) -> list[Any]:
    """The layouts with the models of this file; the suite leaves out those in `more`."""
    return [*map(with_residuals, layouts), *with_mark(map(with_residuals, more))]


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Trained]]:
    """Checkpoints of one rank and what it computes."""
    folder = tmp_path_factory.mktemp("one-rank")
    single = replace(with_residuals(LAYOUTS[0]), num_ranks=1, sizes={}, options={})
    single = replace(single, recompute="full", num_microbatches=1, models=tuple(ALL))
    return folder, run_ranks(1, train_in_every_way, single, folder, None, shares=True)[0]


@pytest.mark.parametrize("layout", rows_of(LAYOUTS, MORE_LAYOUTS), ids=name_of)
def test_a_layout_keeps_the_laws_with_every_residual(
    layout: ResidualLayout, one_rank: tuple[Path, dict[str, Trained]], tmp_path: Path
) -> None:
    folder, single = one_rank
    by_rank = run_ranks(
        layout.num_ranks, train_in_every_way, layout, tmp_path, folder, **layout.sizes, shares=True
    )
    assert_equal_to_one_rank(by_rank, single, layout)


@pytest.mark.parametrize("layout", rows_of(WIDER, MORE_WIDER), ids=name_of)
def test_more_ranks_train_every_residual_as_one_rank_does(
    layout: ResidualLayout, one_rank: tuple[Path, dict[str, Trained]]
) -> None:
    cases = [layout.case(model) for model in MODELS]
    by_rank = run_ranks(layout.num_ranks, train_cases, cases, **layout.sizes, shares=True)
    for model, *outcomes in zip(MODELS, *by_rank, strict=True):
        single = one_rank[1][model].outcome
        assert_alike(outcomes, [single], row=f"{model} {name_of(layout)}", lr=OPTIM["lr"], **BATCH)
