"""Settings merged over files: Hydra's `++key=value` and `~key`, in order."""

from itertools import pairwise

import pytest

from nanotrain.config.flags import parse
from nanotrain.config.load import load
from nanotrain.config.merge import merge_settings
from nanotrain.errors import ConfigError

DATA = "--mock-data --vocab-size 64"


def lr_of(arguments: str) -> float:
    return load(f"+config=tiny {DATA} {arguments}".split()).config.optim.lr


TINY_LR = 5e-3  # as in configs/config/tiny.yaml


@pytest.mark.parametrize(
    ("arguments", "lr"),
    [
        ("", TINY_LR),
        ("optim.lr=1e-3", 1e-3),
        ("++optim.lr=1e-3", 1e-3),
        ("~optim.lr", 3e-4),  # the default of the field
        (f"~optim.lr={TINY_LR}", 3e-4),
        ("~optim.lr optim.lr=1e-3", 1e-3),  # the last one counts
        ("--lr 1e-3 ~optim.lr", 3e-4),
        ("++optim.lr=1e-3 --lr 2e-3", 2e-3),
    ],
)
def test_the_overrides_of_hydra(arguments, lr):
    assert lr_of(arguments) == lr


def test_lists_are_those_of_hydras_grammar_with_every_prefix():
    line = parse(["++data.data_path=[a,b]"])
    assert merge_settings({}, line.settings) == {"data.data_path": ["a", "b"]}


def test_a_deleted_value_of_megatrons_defaults_is_megatrons():
    line = parse(["optim.adam_beta2=0.9", "~optim.adam_beta2"])
    values = merge_settings({}, line.settings, defaults={"optim.adam_beta2": 0.999})
    assert values == {"optim.adam_beta2": 0.999}


def test_a_deletion_is_explained():
    loaded = load(f"+config=tiny {DATA} ~optim.lr".split())
    assert loaded.origins["optim.lr"] == "command line: ~optim.lr"
    assert "optim.lr" in loaded.explicit


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("~optim.lr=5", f"~optim.lr=5 deletes nothing: optim.lr is {TINY_LR}; write ~optim.lr"),
        ("~optim.lrr", "unknown key optim.lrr; did you mean optim.lr?"),
        ("++optim.lrr=1", "unknown key optim.lrr; did you mean optim.lr?"),
        ("+optim.lr=1", "+optim.lr=1 begins with +: every field exists already"),
        ("~+optim.lr=1", "begins with ~+"),
        ("--bf16 ~precision.params_dtype", "--bf16 contradicts ~precision.params_dtype"),
        ("++optim.lr=", "++optim.lr= has no value"),
    ],
)
def test_an_override_that_cannot_be_is_one_error(argument, message):
    with pytest.raises(ConfigError) as caught:
        lr_of(argument)
    assert message in str(caught.value)


def test_references_stand_for_texts_of_bounded_length(monkeypatch):
    monkeypatch.setattr("nanotrain.config.merge.MAX_RESOLVED", 10_000)
    arguments = ["train.wandb_project=xxxxxxxxxx"]
    for before, name in pairwise(("wandb_project", "wandb_exp_name", "wandb_entity", "run_dir")):
        arguments.append(f"train.{name}='{f'${{train.{before}}}' * 6}'")
    load([*arguments[:2], *DATA.split()])
    # three fields of six references: 6 x 6 x 6 times the longest text, of 6 x 23 characters
    with pytest.raises(ConfigError, match="may have 29,808 characters, at most 10,000"):
        load([*arguments, *DATA.split()])


def test_paths_of_many_corpora_may_have_two_variables_each(monkeypatch):
    monkeypatch.setenv("SCRATCH", "/s")
    monkeypatch.setenv("USER", "u")
    paths = ",".join(f"'${{oc.env:SCRATCH}}/${{oc.env:USER}}/{number}'" for number in range(64))
    config = load([f"data.data_path=[{paths}]", "--vocab-size", "8"]).config
    assert config.data.data_path[63] == "/s/u/63"
