"""The options of sampling have one set of limits, wherever they are made."""

import math
from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from nanotrain.cli.main import main
from nanotrain.errors import ConfigError
from nanotrain.inference.generate import sample_token
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


@pytest.mark.parametrize("seed", range(12))
def test_the_probabilities_are_those_of_transformers(seed: int) -> None:
    """All options at once, in the order of transformers."""
    draw = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(1, 30, generator=draw)
    temperature, top_k, top_p = 0.3 + 0.2 * seed, 1 + 3 * seed, (1 + seed) / 12
    given = torch.zeros(0)

    def multinomial(probabilities: torch.Tensor, *args: object, **options: object) -> torch.Tensor:
        nonlocal given
        given = probabilities
        return torch.tensor([0])

    sampling = Sampling(temperature, top_k=top_k, top_p=top_p)
    with patch.object(torch, "multinomial", multinomial):
        sample_token(logits[0], sampling, generator=draw)
    ids = torch.zeros(1, 1, dtype=torch.int64)
    expected = TemperatureLogitsWarper(temperature)(ids, logits)
    expected = TopKLogitsWarper(top_k)(ids, expected)
    expected = TopPLogitsWarper(top_p)(ids, expected).softmax(-1)[0]
    torch.testing.assert_close(given / given.sum(), expected)
