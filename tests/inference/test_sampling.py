"""The options of sampling have one set of limits, wherever they are made."""

import math
from typing import Any

import pytest

from nanotrain.cli.main import main
from nanotrain.errors import ConfigError
from nanotrain.inference.sampling import Sampling

WRONG = [
    ("temperature", -1, "is no number of at least 0"),
    ("temperature", math.nan, "is no number of at least 0"),
    ("temperature", math.inf, "is no number of at least 0"),
    ("temperature", True, "is no number of at least 0"),
    ("temperature", None, "is no number of at least 0"),
    ("top_k", 0, "is no whole number of at least 1"),
    ("top_k", 1.5, "is no whole number of at least 1"),
    ("top_p", 0, "is no probability: it is above 0 and at most 1"),
    ("top_p", 1.1, "is no probability: it is above 0 and at most 1"),
    ("top_p", math.nan, "is no probability"),
    ("repetition_penalty", 0, "is no number above 0"),
    ("seed", -1, "is no whole number of at least 0 and below 10^18"),
    ("seed", 10**18, "is no whole number of at least 0 and below 10^18"),
]


@pytest.mark.parametrize(("name", "value", "message"), WRONG)
def test_a_value_out_of_its_limits_is_one_error_everywhere(
    name: str, value: Any, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError) as error:
        Sampling(**{name: value})
    assert f"{name} {value!r} {message}" in str(error.value)
    assert main(["generate", "runs/x", f"--{name.replace('_', '-')}", str(value)]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("stop", [-1, (3, "a"), [True], 1.5])
def test_a_stop_that_is_no_token_is_refused(stop: Any) -> None:
    with pytest.raises(ConfigError, match="is no token id"):
        Sampling(stop=stop if not isinstance(stop, float) else (stop,))


def test_one_end_or_several() -> None:
    assert Sampling().ends == () and Sampling(stop=3).ends == (3,)
    assert Sampling(stop=(4, 5)).ends == (4, 5)
    assert Sampling(temperature=1e-40).is_greedy and not Sampling(temperature=1e-20).is_greedy
