"""`~` and variables in paths: all of the command line, an allow list for recipes."""

import pytest

from nanotrain.config.load import load_config
from nanotrain.config.user_paths import expand_path, may_read, refuse_variables, with_variables
from nanotrain.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "is_allowed"),
    [
        ("HOME", True),
        ("SCRATCH", True),
        ("SLURM_JOB_ID", True),
        ("SLURM_JWT", False),
        ("GH_PAT", False),
        ("AZURE_STORAGE_CONNECTION_STRING", False),
        ("NANOTRAIN_NOTIFY", False),
    ],
)
def test_a_recipe_reads_variables_of_the_allow_list(name, is_allowed):
    assert may_read(name, {}) is is_allowed
    assert may_read(name, {"NANOTRAIN_RECIPE_VARIABLES": "GH_PAT"}) is (
        is_allowed or name == "GH_PAT"
    )
    assert may_read(name, {"NANOTRAIN_RECIPE_VARIABLES": "HF_TOKEN,SLURM_JWT"}) is is_allowed


def test_variables_of_the_command_line_are_replaced_and_secrets_stay(monkeypatch):
    monkeypatch.setenv("GH_PAT", "a")
    monkeypatch.setenv("HF_TOKEN", "b")
    monkeypatch.delenv("NOT_SET", raising=False)
    texts = ["$GH_PAT/${GH_PAT}", "$HF_TOKEN", "$NOT_SET", "${train.seed}"]
    assert with_variables(texts) == ["a/a", "$HF_TOKEN", "$NOT_SET", "${train.seed}"]


def test_paths_of_recipes_are_expanded_or_refused(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("GH_PAT", "a")
    assert expand_path(["~", "web=~/a", "0.5 ~/a 0.5 b~c", 3]) == [
        "/home/me",
        "web=/home/me/a",
        "0.5 /home/me/a 0.5 b~c",
        3,
    ]
    with pytest.raises(ConfigError, match="GH_PAT is none of them"):
        expand_path(["b", "$GH_PAT"])


def test_paths_made_in_python_are_not_expanded():
    assert refuse_variables(["a", "b~c", 3]) == ["a", "b~c", 3]
    for text in ("~/a", "$HOME/a", "s3://b/${HOME}"):
        with pytest.raises(ConfigError, match="not expanded"):
            refuse_variables([text])


@pytest.mark.parametrize(
    ("address", "is_allowed"),
    [
        ("127.0.0.1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("127.0.0.1.host", False),
    ],
)
def test_a_recipe_opens_no_port_to_the_network(address, is_allowed, tmp_path):
    (tmp_path / "a.yaml").write_text(
        f"train: {{prometheus_port: 9999, prometheus_address: '{address}'}}"
    )
    line = ["--mock-data", "--vocab-size", "64", f"+config={tmp_path / 'a.yaml'}"]
    if not is_allowed:
        with pytest.raises(ConfigError, match="write --prometheus-address"):
            load_config(line)
        line += ["--prometheus-address", address]
    assert load_config(line).train.prometheus_address == address
