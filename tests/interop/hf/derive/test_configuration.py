"""Configuration classes are read as text: which one is meant, its defaults, what it computes."""

from pathlib import Path
from typing import Any

import pytest

from nanotrain.errors import HuggingFaceError
from nanotrain.interop.hf.derive.configuration import ConfigurationText, read_configuration

TWO = """
raise SystemExit
class MineVisionConfig:
    model_type = "mine_vision"
    def __init__(self, rope_theta=100.0): ...

class Shared(PretrainedConfig):
    kept: int = 3
    changed: float = 1.5
    made: float = 2.5

class MineConfig(Shared):
    model_type = "mine"
    changed: float = -2.5
    made: float = interval()(default=1)
    attribute_map = {"width": "hidden_size"}
    def __init__(self, rope_theta=10000.0, a=..., b=b"x", c=1j, *, d=None, e=[], f=4, **kwargs):
        self.rope_theta = rope_theta
        self.other = f
        self.g = kwargs.pop("gain", 1.0)
        super().__init__(d=d, **kwargs)
"""


def read(folder: Path, text: str, **entries: Any) -> ConfigurationText:
    (folder / "configuration_mine.py").write_text(text)
    return read_configuration(folder, raw=entries, kind="mine")


def test_defaults_are_those_of_the_class_with_the_model_type(tmp_path: Path) -> None:
    """Classes that it builds on count, others of the file do not; rows hold plain values alone."""
    defaults = read(tmp_path, TWO).defaults
    expected = {"kept": 3, "changed": -2.5, "rope_theta": 10000.0, "d": None, "f": 4}
    assert defaults == expected


def test_the_class_that_auto_map_names_comes_first(tmp_path: Path) -> None:
    auto_map = {"AutoConfig": "configuration_mine.MineVisionConfig"}
    assert read(tmp_path, TWO, auto_map=auto_map).defaults == {"rope_theta": 100.0}


def test_a_value_that_is_only_kept_is_not_computed_with(tmp_path: Path) -> None:
    text = read(tmp_path, TWO)
    assert {"f", "gain"} <= text.computes
    assert not {"rope_theta", "d", "changed"} & text.computes
    assert text.aliases == {"width"}


@pytest.mark.parametrize(
    ("text", "auto_map", "named"),
    [
        (TWO.replace("mine_vision", "mine"), {}, "2 classes"),
        (TWO.replace('"mine"', '"yours"'), {}, "0 classes"),
        (TWO, {"AutoConfig": "configuration_mine.Other"}, "named 'Other'"),
        ("class (", {}, "cannot parse"),
        ("\0", {}, "cannot parse"),
    ],
)
def test_a_class_that_is_not_clear_is_one_error(
    text: str, auto_map: dict[str, str], named: str, tmp_path: Path
) -> None:
    with pytest.raises(HuggingFaceError, match=named):
        read(tmp_path, text, auto_map=auto_map)


def test_a_folder_without_the_file_says_nothing(tmp_path: Path) -> None:
    assert read_configuration(tmp_path, raw={}, kind="mine") == ConfigurationText()
