"""Values from the environment are used, and written as references."""

import pickle

import pytest

from nanotrain.config.load import load_config, to_yaml
from nanotrain.config.schema import to_dict
from nanotrain.errors import ConfigError


def test_a_value_from_the_environment_is_used_and_its_reference_written(monkeypatch, tmp_path):
    monkeypatch.setenv("PROJECT_OF_TEST", "secret")
    config = load_config(["--mock-data", "train.wandb=true", "train.wandb_project=a-${oc.env:PROJECT_OF_TEST}"])
    assert config.train.wandb_project == "a-secret"
    assert to_dict(config)["train"]["wandb_project"] == "a-${oc.env:PROJECT_OF_TEST}"
    assert to_dict(pickle.loads(pickle.dumps(config))) == to_dict(config)
    (tmp_path / "again.yaml").write_text(to_yaml(config))
    assert load_config([f"+config={tmp_path / 'again.yaml'}"]) == config


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train.notify=${oc.env:KEY_OF_TEST}"], "train.notify is ${oc.env:KEY_OF_TEST}: it must begin with"),
        (["train.notify=a-${oc.env:KEY_OF_TEST}"], "train.notify is a-${oc.env:KEY_OF_TEST}: it must"),
        (["train.train_iters=${oc.env:KEY_OF_TEST}"], "train.train_iters is '${oc.env:KEY_OF_TEST}': it takes"),
        (["data.data_path=${oc.env:KEY_OF_TEST}"], "data.data_path = ${oc.env:KEY_OF_TEST} has no effect"),
        (["train.lr=1", "train.train_iters=${oc.env:KEY_OF_TEST}"], "'${oc.env:KEY_OF_TEST}'"),
    ],
)
def test_no_error_shows_a_value_from_the_environment(arguments, message, monkeypatch):
    monkeypatch.setenv("KEY_OF_TEST", "sec\\ret")
    with pytest.raises(ConfigError) as caught:
        load_config(["--mock-data", "--vocab-size", "64", *arguments])
    assert message in str(caught.value) and "ret:" not in str(caught.value) and "sec\\" not in str(caught.value)
