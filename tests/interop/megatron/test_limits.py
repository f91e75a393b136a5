"""Every model that Megatron-LM has no place for is refused by its name."""

import json
from pathlib import Path

from nanotrain.interop.megatron.limits import unsupported_settings
from tests.config.asking import config_of

MESSAGES = Path(__file__).parents[2] / "config" / "rules" / "messages.json"


def test_every_limit_of_megatron_lm_is_named() -> None:
    rows = [row for row in json.loads(MESSAGES.read_text()) if row["rule"].startswith("megatron.")]
    for row in rows:
        model_config = config_of(**row["settings"]).model
        assert unsupported_settings(model_config) == row["errors"], row["rule"]
    assert len(rows) > 36
    assert unsupported_settings(config_of().model) == []
