"""The sections: frozen, nested, without lists that other packages hold."""

from dataclasses import FrozenInstanceError, fields

import pytest

from nanotrain.config.config import Config
from nanotrain.config.model import MLAConfig, ModelConfig, MoEConfig
from nanotrain.config.schema import ENTRIES, with_values


def test_a_configuration_cannot_be_changed():
    with pytest.raises(FrozenInstanceError):
        Config().model.mtp.num_layers = 3


def test_experts_and_latent_attention_are_sections_that_a_model_may_not_have():
    assert ModelConfig().moe is None and ModelConfig().mla is None
    model = with_values(
        Config(), {"model.moe.num_experts": 2, "model.multi_latent_attention": True}
    ).model
    assert model.mla == MLAConfig() and model.moe == MoEConfig(num_experts=2)
    assert [field.name for field in fields(ModelConfig)][-3:] == ["mla", "moe", "mtp"]


@pytest.mark.parametrize("value", ["1f1b", "p2p", "adam"])
def test_names_of_tables_are_strings_that_no_literal_lists(value):
    config = Config()
    assert value in (
        config.parallel.pipeline_schedule,
        config.parallel.cp_comm_type,
        config.optim.optimizer,
    )
    assert not [entry.key for entry in ENTRIES.values() if value in entry.choices]
