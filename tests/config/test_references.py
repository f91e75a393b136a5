"""Values from the environment are used, and written as references; YAML files are checked before they are composed."""

import pickle

import pytest

from nanotrain.config.load import load_config, to_yaml
from nanotrain.config.schema import to_dict
from nanotrain.config.yaml_file import MAX_BYTES, check_yaml
from nanotrain.errors import ConfigError


def test_a_value_from_the_environment_is_used_and_its_reference_written(monkeypatch, tmp_path):
    monkeypatch.setenv("PROJECT_OF_TEST", "secret")
    config = load_config(["--mock-data", "train.wandb=true", "train.wandb_project=a-${oc.env:PROJECT_OF_TEST}"])
    assert config.train.wandb_project == "a-secret"
    assert to_dict(config)["train"]["wandb_project"] == "a-${oc.env:PROJECT_OF_TEST}"
    assert to_dict(pickle.loads(pickle.dumps(config))) == to_dict(config)
    (tmp_path / "again.yaml").write_text(to_yaml(config))
    assert load_config([f"+config={tmp_path / 'again.yaml'}"]) == config


def test_a_large_or_missing_file_is_an_error_and_a_few_aliases_are_not(tmp_path):
    (tmp_path / "large.yaml").write_bytes(b"#" * (MAX_BYTES + 1))
    (tmp_path / "fine.yaml").write_text("a: &a [1, 2]\nb: [*a, *a]\n")
    check_yaml(tmp_path / "fine.yaml")
    for name, says in (("large", "larger than 1,048,576 bytes"), ("missing", "No such file")):
        with pytest.raises(ConfigError, match=says):
            check_yaml(tmp_path / f"{name}.yaml")
