"""Law L1 for attention inside documents: every form of context parallelism computes what one rank
computes.
"""

from typing import Any

import pytest

from nanotrain.attention import tiles
from tests.harness import run_ranks
from tests.laws.compare import Row, assert_row_trains_as_one_rank
from tests.laws.worlds import Case, train_here

DOCUMENTS = {"reset_attention_mask": True}
MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window, sinks": {"window_size": 5, "window_attn_skip_freq": "2", "softmax_type": "learnable"},
}
LAYOUTS: list[Row] = [
    ("plain", 2, {"strategy": "optim_grads", "cp": 2}, {}),
    ("plain", 2, {"strategy": "optim", "cp": 2}, {"cp_comm_type": "allgather"}),
    ("plain", 2, {"strategy": "optim", "cp": 2}, {"cp_comm_type": "a2a"}),
    ("plain", 4, {"strategy": "optim", "cp": 4}, {"cp_comm_type": "a2a+p2p"}),
    ("window, sinks", 4, {"strategy": "optim_grads", "cp": 4}, {"cp_comm_type": "a2a+p2p"}),
    ("plain", 4, {"strategy": "optim_grads_params", "tp": 2, "pp": 2}, {}),
    ("window, sinks", 4, {"strategy": "optim", "tp": 2, "cp": 2}, {"sequence_parallel": True}),
]


@pytest.mark.parametrize("row", LAYOUTS, ids=str)
def test_documents_train_as_on_one_rank(row: Row) -> None:
    assert_row_trains_as_one_rank(row, MODELS, data=DOCUMENTS)


def losses(ctx, case: Case, queries_per_mask: int) -> list[float]:
    """The losses with tiles of another size."""
    tiles.QUERIES_PER_MASK = queries_per_mask  # of this process alone
    return train_here(ctx, case).losses


def test_borders_matter_and_tiles_of_any_size_give_the_same_losses() -> None:
    case = Case(2)
    (crossing,) = run_ranks(1, losses, case, 128)
    (masked,), (unmasked,) = (
        run_ranks(1, losses, case.but(data=DOCUMENTS), size) for size in (128, 1)
    )
    assert masked == pytest.approx(unmasked, rel=1e-6)
    assert abs(masked[0] - crossing[0]) > 1e-4 * crossing[0], "attention crosses documents"
