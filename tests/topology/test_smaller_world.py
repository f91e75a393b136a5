"""How many ranks go on in the layout of a run after one has left."""

from dataclasses import replace

import pytest

from nanotrain.config.config import Config
from nanotrain.config.load import load
from nanotrain.errors import ConfigError
from nanotrain.topology.smaller_world import largest_world, require_smaller_world


def config_of(flags: str) -> Config:
    line = f"+config=tiny --mock-data --vocab-size 256 --inprocess-restart {flags}"
    return load(line.split()).config


@pytest.mark.parametrize(
    ("flags", "at_most", "expected"),
    [
        ("", 7, 0),
        ("--inprocess-min-ranks 1", 7, 7),
        ("--inprocess-min-ranks 1 --tensor-model-parallel-size 2", 7, 6),
        ("--inprocess-min-ranks 5 --tensor-model-parallel-size 4", 7, 0),
        ("--inprocess-min-ranks 4 --tensor-model-parallel-size 4", 7, 4),
        ("--inprocess-min-ranks 1 --global-batch-size 4 --micro-batch-size 2", 7, 2),
        ("--inprocess-min-ranks 1 --replay-interval 10", 1, 0),
        ("--inprocess-min-ranks 1 --num-experts 8 --expert-model-parallel-size 4", 7, 4),
        ("--inprocess-min-ranks 1 --profile --profile-ranks 5", 7, 7),
        ("--inprocess-min-ranks 1 --profile --profile-ranks 5", 5, 0),
    ],
)
def test_the_most_ranks_that_form_the_layout_go_on(flags: str, at_most: int, expected: int) -> None:
    assert largest_world(config_of(f"--global-batch-size 16 {flags}"), at_most) == expected


@pytest.mark.parametrize(
    ("flags", "world_size", "says"),
    [
        ("", 8, "inprocess_min_ranks 8: no rank of 8 ranks can leave the run: a run of 8 ranks"),
        ("--tensor-model-parallel-size 4", 4, "set --inprocess-min-ranks to at most 3"),
        ("", 1, "no rank of 1 rank can leave the run: nobody would go on; leave"),
    ],
)
def test_a_run_that_has_no_smaller_world_is_refused(flags: str, world_size: int, says: str) -> None:
    config = config_of(f"--global-batch-size 16 --inprocess-min-ranks {world_size} {flags}")
    with pytest.raises(ConfigError, match=says):
        require_smaller_world(config, world_size)


def test_the_reason_is_that_of_the_layout() -> None:
    flags = "--global-batch-size 16 --inprocess-min-ranks 5 --tensor-model-parallel-size 4"
    config = config_of(flags)
    with pytest.raises(ConfigError, match="on 5 ranks: 5 ranks cannot form tp=4 x cp=1 x pp=1"):
        require_smaller_world(config, 8)
    unset = replace(config, train=replace(config.train, inprocess_min_ranks=None))
    require_smaller_world(unset, 1)
