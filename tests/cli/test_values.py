"""Converters of arguments: numbers, lists and files."""

from argparse import ArgumentTypeError

import pytest

from nanotrain.cli import values


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("count", "3", ["0", "-1", "1.5", "x"]),
        ("positive", "0.5", ["0", "inf", "nan"]),
        ("not_negative", "0", ["-1", "inf"]),
        ("processes", "2", ["0", "257"]),
        ("world_size", "9", ["0", "200001"]),
        ("seed", "0", ["-1", "1" * 20]),
        ("port", "0", ["-1", "65536"]),
        ("examples", "0", ["-1", "65"]),
    ],
)
def test_numbers_out_of_bounds_are_no_values(name, good, bad):
    convert = getattr(values, name)
    assert convert(good) == float(good)
    for text in bad:
        with pytest.raises(ArgumentTypeError, match=text):
            convert(text)


@pytest.mark.parametrize("text", ["", "1,", "-1", "1;2", "1 2"])
def test_a_list_of_ranks_is_whole_numbers_with_commas(text):
    assert values.whole_numbers("0,1,8") == (0, 1, 8)
    with pytest.raises(ArgumentTypeError, match="no list of whole numbers"):
        values.whole_numbers(text)


def test_words_are_divided_as_in_a_shell():
    assert values.words("sbatch 'my script'") == ["sbatch", "my script"]
    with pytest.raises(ArgumentTypeError, match="invalid 'words' value"):
        values.words("'open")
