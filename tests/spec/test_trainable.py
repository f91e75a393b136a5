"""Patterns of trained parameters: what they choose, and mistakes in them."""

import re

import pytest

from nanotrain.config.config import Config
from nanotrain.config.data import DataConfig
from nanotrain.config.model import ModelConfig
from nanotrain.config.optim import OptimConfig
from nanotrain.errors import ConfigError, ConfigErrors
from nanotrain.spec.parameters import declare_model
from nanotrain.spec.shape import ModelShape
from nanotrain.spec.stages import StageSpec, split_layers
from nanotrain.spec.trainable import (
    TrainableSet,
    first_trained_stage,
    mark_trainable,
    require_matches,
    trained_set,
)

SHAPE = ModelShape.of(ModelConfig(num_layers=4, vocab_size=128))


def trained(trainable: TrainableSet) -> list[str]:
    specs = mark_trainable(declare_model(SHAPE), trainable)
    return [spec.name for spec in specs if spec.is_trainable]


def test_patterns_choose_names() -> None:
    names = [spec.name for spec in declare_model(SHAPE)]
    assert trained(TrainableSet()) == names
    chosen = trained(TrainableSet(train_only=("layers.[12].mlp.*",), freeze=("*.down.weight",)))
    assert chosen == [
        f"layers.{layer}.mlp.{name}.weight" for layer in (1, 2) for name in ("gate", "up")
    ]
    assert "layers.3.mlp.up.weight" in trained(TrainableSet(freeze=("layers.0.*",)))


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        ({"freeze": ("embeding.*",)}, "did you mean embedding.*"),
        ({"freeze": ("embedding",)}, "did you mean embedding.*"),
        ({"train_only": ("layers.*.atention.query.weight",)}, "layers.*.attention.query.weight"),
        ({"freeze": ("zzz",)}, "write a name with * for any characters"),
        ({"freeze": ("head.*",)}, "the output layer shares embedding.word.weight"),
        ({"freeze": ("*",)}, "nothing is trained: all"),
        ({"train_only": ("layers.*",), "freeze": ("embedding.*",)}, "has no effect"),
        (
            {"train_only": ("embedding.*", "layers.*"), "freeze": ("embed*",)},
            "--train-only embedding.* and --freeze contradict each other",
        ),
    ],
)
def test_a_mistake_is_one_message(patterns: dict[str, tuple[str, ...]], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("*", r"\*")) as raised:
        require_matches((("", TrainableSet(**patterns)),), SHAPE)
    assert not isinstance(raised.value, ConfigErrors)


def test_a_pattern_has_its_effect_in_any_stage() -> None:
    warm_up = TrainableSet(train_only=("layers.1.*",), freeze=("layers.0.*",))
    later = TrainableSet(freeze=("layers.0.*",))
    require_matches((("warm_up", warm_up), ("all", later)), SHAPE)
    with pytest.raises(ConfigError, match=r"--freeze layers\.0\.\* has no effect"):
        require_matches((("warm_up", warm_up), ("all", TrainableSet())), SHAPE)
    with pytest.raises(ConfigError, match="nothing is trained in the data stage all: all"):
        require_matches((("warm_up", warm_up), ("all", TrainableSet(freeze=("*",)))), SHAPE)


@pytest.mark.parametrize(
    ("pattern", "stages", "message"),
    [
        ("=head.*", ["web@0: web"], "=head.* has no data stage before the ="),
        ("web=head.*", [], "--data-stages is unset; set --data-stages, or write head.* alone"),
        ("wep=head.*", ["web@0: web"], "--data-stages has web; did you mean web?"),
    ],
)
def test_patterns_name_stages_of_the_data(pattern: str, stages: list[str], message: str) -> None:
    config = Config(optim=OptimConfig(freeze=[pattern]), data=DataConfig(stages=stages))
    with pytest.raises(ConfigError, match=re.escape(message)):
        trained_set(config, SHAPE)


def test_all_patterns_without_a_match_are_in_one_error() -> None:
    with pytest.raises(ConfigErrors) as raised:
        require_matches((("", TrainableSet(freeze=("x",), train_only=("y",))),), SHAPE)
    assert len(raised.value.errors) == 2


def test_backwards_end_at_the_first_stage_with_trained_parameters() -> None:
    stages: tuple[StageSpec, ...] = split_layers(4, 4)
    for trainable, expected in (
        (TrainableSet(), 0),
        (TrainableSet(freeze=("embedding.*", "layers.0.*")), 1),
        (TrainableSet(train_only=("layers.2.mlp.*",)), 2),
        (TrainableSet(freeze=("layers.*",)), 0),
    ):
        assert first_trained_stage(trainable, SHAPE, stages=stages) == expected
