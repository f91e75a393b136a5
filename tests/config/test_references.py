"""Values from the environment are used, and written as references."""

import pickle

import pytest

from nanotrain.config.load import load_config, to_yaml
from nanotrain.config.schema import to_dict
from nanotrain.errors import ConfigError


def test_a_value_from_the_environment_is_used_and_its_reference_written(monkeypatch, tmp_path):
    monkeypatch.setenv("PROJECT_OF_TEST", "secret")
    config = load_config(
        ["--mock-data", "train.wandb=true", "train.wandb_project=a-${oc.env:PROJECT_OF_TEST}"]
    )
    assert config.train.wandb_project == "a-secret"
    assert to_dict(config)["train"]["wandb_project"] == "a-${oc.env:PROJECT_OF_TEST}"
    assert to_dict(pickle.loads(pickle.dumps(config))) == to_dict(config)
    (tmp_path / "again.yaml").write_text(to_yaml(config))
    assert load_config([f"+config={tmp_path / 'again.yaml'}"]) == config


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["train.notify=${oc.env:KEY_OF_TEST}"],
            "train.notify is ${oc.env:KEY_OF_TEST}: it must begin with",
        ),
        (
            ["train.notify=a-${oc.env:KEY_OF_TEST}"],
            "train.notify is a-${oc.env:KEY_OF_TEST}: it must",
        ),
        (
            ["train.train_iters=${oc.env:KEY_OF_TEST}"],
            "train.train_iters is '${oc.env:KEY_OF_TEST}': it takes",
        ),
        (
            ["data.data_path=${oc.env:KEY_OF_TEST}"],
            "data.data_path = ${oc.env:KEY_OF_TEST} has no effect",
        ),
        (["train.lr=1", "train.train_iters=${oc.env:KEY_OF_TEST}"], "'${oc.env:KEY_OF_TEST}'"),
    ],
)
def test_no_error_shows_a_value_from_the_environment(arguments, message, monkeypatch):
    monkeypatch.setenv("KEY_OF_TEST", "sec\\ret")
    with pytest.raises(ConfigError) as caught:
        load_config(["--mock-data", "--vocab-size", "64", *arguments])
    assert (
        message in str(caught.value)
        and "ret:" not in str(caught.value)
        and "sec\\" not in str(caught.value)
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('notify: "http://host/${oc.env:HF_TOKEN}"', "notify in .* only its own variable"),
        ('notify: "http://host/"', "write ..oc.env:NANOTRAIN_NOTIFY,null. there"),
        ('notify: "${oc.env:OTHER}"', "only its own variable"),
        ('wandb_project: "${oc.env:HF_TOKEN}"', "whose name is not that of a secret"),
        ('wandb_project: "a-${oc.env:NANOTRAIN_NOTIFY}"', "whose name is not that of a secret"),
        ('wandb_project: "${oc.env:NOT_SET,${oc.env:HF_TOKEN}}"', "refers to ..oc.env:HF_TOKEN"),
        ('wandb_project: "${oc.env:HF_${train.device}}"', "refers to"),
        ("wandb_project: \"${oc.env:'HF_TOKEN'}\"", "refers to"),
        ('wandb_project: "${oc.create:[1]}"', "refers to ..oc.create"),
        ('wandb_project: "${oc.decode:x}"', "refers to ..oc.decode"),
        (
            'step_batch_size_schedule: ["${oc.env:HF_TOKEN}"]',
            "step_batch_size_schedule in .* refers to",
        ),
    ],
)
def test_a_file_reads_no_secret(text, message, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_TOKEN", "sec-ret")
    (tmp_path / "a.yaml").write_text(f"train: {{{text}}}")
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(["--mock-data", f"+config={tmp_path / 'a.yaml'}"])
    assert "sec-ret" not in str(caught.value)


def test_a_file_refers_to_fields_and_to_variables_that_are_meant_for_it(monkeypatch, tmp_path):
    monkeypatch.setenv("NANOTRAIN_NOTIFY", "https://hooks.example/x")
    lines = (
        "notify: ${oc.env:NANOTRAIN_NOTIFY}",
        "wandb_project: a-${train.seed}-${oc.env:NOT_SET,b}",
        "wandb: true",
    )
    (tmp_path / "a.yaml").write_text("train:\n  " + "\n  ".join(lines))
    train = load_config(["--mock-data", f"+config={tmp_path / 'a.yaml'}"]).train
    assert (train.notify, train.wandb_project) == ("https://hooks.example/x", "a-1234-b")
