"""Layers of a small model: ends and uneven stages stay as they were."""

import pytest

from nanotrain.config.parallel import ParallelConfig
from nanotrain.parity.layers import shrink_layers


@pytest.mark.parametrize(
    ("num_layers", "per_stage", "expected"),
    [(80, 2, 8), (80, 1, 4), (81, 2, 9), (3, 2, 3)],
)
def test_stages_have_so_many_layers_and_one_more_if_they_are_uneven(
    num_layers: int, per_stage: int, expected: int
) -> None:
    parallel = ParallelConfig(pipeline_model_parallel_size=4)
    assert shrink_layers(num_layers, parallel, per_stage=per_stage) == (expected, parallel)


def test_ends_that_count_as_layers_leave_room_for_them() -> None:
    parallel = ParallelConfig(
        pipeline_model_parallel_size=2,
        account_for_embedding_in_pipeline_split=True,
        account_for_loss_in_pipeline_split=True,
    )
    assert shrink_layers(62, parallel)[0] == 2


def test_stages_of_a_layout_keep_up_to_three_layers() -> None:
    parallel = ParallelConfig(
        pipeline_model_parallel_size=2, pipeline_model_parallel_layout="Ettttt|ttL"
    )
    num_layers, small = shrink_layers(7, parallel)
    assert num_layers == 5
    assert small.pipeline_model_parallel_layout == "Et*3|t*2L"
