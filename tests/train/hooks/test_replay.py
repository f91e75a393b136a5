"""The error of a replay names ranks, hosts and the first parameter; tests/laws has whole runs."""

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from nanotrain.runs.failures import RankFailure
from nanotrain.runs.verdict import Evidence, judge
from nanotrain.train.hooks.replay import Finding, _norm_and_projection, _Observer, describe
from tests.train.small_run import small_run

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


@pytest.mark.parametrize(
    ("findings", "verdict"),
    [
        ([Finding((3,), (1, 0), (WEIGHT,), 40)], "exclude b: "),
        ([Finding((0,), (2,), (LOSS,), 40), Finding((2,), (0,), (LOSS,), 40)], "exclude a,b: "),
        ([Finding((1, 2), (), (LOSS,), 40)], "restart: "),
    ],
    ids=["one host", "ranks of a replica on two hosts", "one of two hosts"],
)
def test_the_verdict_excludes_the_hosts_that_err(findings: list[Finding], verdict: str) -> None:
    error = describe(findings, HOSTS, step=100)

    evidence = Evidence(exit_codes={0: 2}, failures=[RankFailure.of(error, rank=0)])

    assert judge(evidence).line.startswith(verdict)


class WrittenGrads(NamedTuple):
    """The gradients of a bucket, in some order."""

    grads: dict[str, Tensor]

    def written_grads(self, *, with_ahead: bool) -> dict[str, Tensor]:
        return self.grads


def test_rows_do_not_depend_on_the_order_of_the_gradients(tmp_path: Path) -> None:
    """A bucket has the names of its gradients in a set, whose order differs from rank to rank."""
    with small_run(tmp_path / "run") as run:
        observer = _Observer(run, is_exact=False)
        names = observer._names[0]
        grads = {name: torch.full((2,), float(number)) for number, name in enumerate(names, 1)}
        results = []
        for order in (names, names[::-1]):
            observer.begin(run.schedules.of(1))
            observer._take_grads(0, WrittenGrads({name: grads[name] for name in order}))  # type: ignore[arg-type]
            results.append(observer.take())

    assert len(names) > 1 and torch.equal(*results)
    for number, name in enumerate(names, 1):
        row = observer.rows.index(f"{name} (bucket 0)")
        assert results[0][row, 0].item() == pytest.approx(number * 2**0.5)
