"""Why a checkpoint in memory is not used, and what is logged of partners."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nanotrain.checkpoint.manifest import Manifest
from nanotrain.config.load import load
from nanotrain.config.schema import to_dict
from nanotrain.plan.plan import plan_run
from nanotrain.topology.partners import Host
from nanotrain.train.resume.from_memory import _log_partners, _refusal
from tests.train.small_run import arguments

CONFIG = load(arguments(Path("r"))).config
PLAN = plan_run(CONFIG, 1, rank=0)


def refusal(*, starts: list[int], objects: dict[str, Any] | None = None, seed: int = 1234) -> str:
    config = to_dict(PLAN.config)
    config["train"] = {**config["train"], "seed": seed}
    manifest = Manifest(6, {}, {}, objects or {}, config, {"num_starts": 1})
    memory: Any = SimpleNamespace(start_steps=lambda: starts)
    return _refusal(manifest, plan=PLAN, stored=None, memory=memory)


def test_a_checkpoint_of_the_same_data_and_of_the_last_start_is_used() -> None:
    assert refusal(starts=[0], seed=CONFIG.train.seed) == ""
    assert refusal(starts=[0, 6], seed=CONFIG.train.seed) == ""


def test_other_checkpoints_are_not() -> None:
    assert refusal(starts=[0], seed=7) == "settings of the data changed since: train.seed 7 -> 1234"
    assert refusal(starts=[0, 5], seed=CONFIG.train.seed) == "a later start went on from step 5"
    assert "data mix" in refusal(
        starts=[0], seed=CONFIG.train.seed, objects={"stages": ["0:a=1 p"]}
    )


@pytest.mark.parametrize(
    ("hosts", "text"),
    [
        ("ab", "2 hosts, each shard with a copy on another one"),
        ("aa", "one host, without copies on another one"),
        ("aaab", "2 hosts, each shard with a copy on another one"),
    ],
)
def test_the_log_says_over_how_many_hosts_the_copies_lie(
    hosts: str, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("nanotrain").propagate = True
    memory: Any = SimpleNamespace(hosts=tuple(Host(name) for name in hosts))
    with caplog.at_level(logging.INFO, logger="nanotrain"):
        _log_partners(memory)
    assert text in caplog.text
