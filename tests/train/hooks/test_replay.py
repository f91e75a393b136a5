"""The error of a replay names ranks, hosts and the first parameter; tests/laws has whole runs."""

import torch

from nanotrain.train.hooks.replay import Finding, _norm_and_projection, describe

HOSTS = ("a", "a", "b", "b")
LOSS, WEIGHT = "the loss", "layers.1.mlp.down.weight (bucket 2)"


def test_the_rank_that_is_alone_is_named_with_its_host() -> None:
    findings = [
        Finding((3,), (1, 0), (WEIGHT, LOSS), 40),
        Finding((3, 1), (), (LOSS,), 40),
    ]
    error = describe(findings, HOSTS, step=100)

    assert error.what == "rank 3 (host b) computed step 100 wrong"
    assert "2 results of 40" in error.why and f"the first is {WEIGHT}; ranks 0-1 agree" in error.why
    assert error.fix.startswith("exclude host b;")


def test_two_ranks_of_which_one_errs_are_both_named() -> None:
    error = describe([Finding((1, 2), (), (LOSS,), 40)], HOSTS, step=4)

    assert error.what == "ranks 1-2 (hosts a, b) disagree on step 4"
    assert "exclude both until then" in error.fix


def test_norm_and_projection_see_a_changed_sign_and_an_exchange_of_values() -> None:
    values = torch.tensor([1.0, 2.0, -3.0, 4.0, 0.5, 1.5, 2.5, 9.0])
    norm, projection = _norm_and_projection(values).tolist()
    assert norm == values.double().norm().item()
    flipped = values.clone()
    flipped[3] *= -1
    assert _norm_and_projection(flipped)[1].item() != projection
