"""Law L1 for linear attention in products of four axes; test_layer_kinds.py has its other layouts."""

import pytest

from tests.laws.compare import Row, assert_row_trains_as_one_rank
from tests.laws.test_layer_kinds import A2A, DOCUMENTS, MODELS
from tests.laws.test_model_features import SP, ZERO3

LAYOUTS: list[Row] = [
    (
        "half layers, kda",
        8,
        {"strategy": "optim", "tp": 2, "cp": 2, "pp": 2, "etp": 1, "ep": 2},
        SP,
    ),
    (
        "half layers, gated delta net",
        8,
        ZERO3 | {"tp": 2, "cp": 2, "etp": 1, "ep": 2, "instances": 2},
        SP | A2A,
    ),
]


@pytest.mark.parametrize("row", LAYOUTS, ids=str)
def test_products_of_four_axes_train_as_one_rank(row: Row) -> None:
    assert_row_trains_as_one_rank(row, MODELS, data=DOCUMENTS)
