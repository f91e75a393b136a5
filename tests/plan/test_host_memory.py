"""Memory of the host for checkpoints in memory, in the table of planned memory."""

import pytest

from nanotrain.plan.memory_plan import plan_memory
from tests.plan.test_memory_plan import config_of

MODEL = "--mock-data --vocab-size 256 --num-layers 2 --hidden-size 64 --num-attention-heads 4"


@pytest.mark.parametrize(("world_size", "copies"), [(1, 3), (2, 5)])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_rank_has_the_copy_to_write_from_and_two_checkpoints_with_partners(
    world_size: int, copies: int, device: str
) -> None:
    """All of it is memory of the rank on a CPU, and none on a GPU."""
    plain, saving = (
        plan_memory(config_of(words), world_size, pp_rank=0, device=device)
        for words in (MODEL, f"{MODEL} --memory-checkpoint-interval 5")
    )

    assert plain.host == 0 and plain.host_lines() == []
    assert saving.host == copies * (saving.params + saving.optimizer)
    assert saving.total - plain.total == (saving.host if device == "cpu" else 0)
    assert "host memory" in saving.table(None)
