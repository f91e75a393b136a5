"""The text of --help: every flag once, with its default."""

import re

from nanotrain.config.help import default_text, describe, help_text
from nanotrain.config.schema import ENTRIES


def test_every_flag_is_listed_once():
    lines = help_text().splitlines()
    for entry in ENTRIES.values():
        flag = f"--[no-]{entry.flag[2:]}" if entry.kind is bool else entry.flag
        assert len([line for line in lines if re.match(rf"  {re.escape(flag)}( |$)", line)]) == 1, entry.key


def test_a_default_is_written_as_it_is_typed():
    texts = {name: default_text(ENTRIES[name]) for name in ("shuffle", "num_experts", "data_path", "lr", "device")}
    assert texts == {"shuffle": "true", "num_experts": "unset", "data_path": "empty", "lr": "0.0003", "device": "auto"}


def test_a_flag_is_described_by_its_meaning():
    assert describe(ENTRIES["moe_router_topk"]) == ["  --moe-router-topk N", "        experts per token (default: 2)"]
