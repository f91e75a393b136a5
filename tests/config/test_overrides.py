"""Arguments in Hydra's forms: where they begin and end, and what is none of them."""

import pytest

from nanotrain.config.flags import parse
from nanotrain.config.overrides import begins_argument


@pytest.mark.parametrize(
    ("text", "is_argument"),
    [
        ("optim.lr=3", True),
        ("++optim.lr=3", True),
        ("~optim.lr", True),
        ("+config=tiny", True),
        ("model=llama7b", True),
        ("--lr", True),
        ("-1", False),
        ("-inf", False),
        ("~/data", False),
        ("~user.name", False),
        ("data/lang=en/part.1", False),
        ("name=data", False),
    ],
)
def test_a_value_is_told_from_the_next_argument(text, is_argument):
    assert begins_argument(text) is is_argument


def test_an_override_ends_the_values_of_a_list_before_it():
    line = parse(["--data-path", "a", "b", "~optim.lr", "--split", "1,0,0"])
    assert [setting.key for setting in line.settings] == [
        "data.data_path",
        "optim.lr",
        "data.split",
    ]


def test_a_home_folder_is_no_deletion():
    line = parse(["--data-path", "~/data/a", "~user.name/b"])
    assert line.settings[0].value == ["~/data/a", "~user.name/b"]
