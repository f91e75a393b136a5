"""Cards: every check is reported, one that was not run is said so, and one that fails is seen."""

from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from nanotrain.config.load import Loaded, load
from nanotrain.config.schema import flat_values
from nanotrain.errors import ConfigError
from nanotrain.interop.hf.families import FAMILIES
from nanotrain.parity import card as card_module
from nanotrain.parity.card import (
    LAYOUTS,
    SIZES,
    Card,
    Check,
    check_layouts,
    check_resume_and_plan,
    make_card,
)
from nanotrain.parity.card_checks import BESIDE_TRANSFORMERS, CHECKS
from nanotrain.parity.card_ranks import Measured
from nanotrain.parity.conversion import twin_config
from scripts.family_cards import CARDS, read_families
from tests.interop.hf.derive.folders import restored_tables


def loaded(*words: str) -> Loaded:
    return load(["+config=tiny", *words])


def fake_ranks(*, loss: float, sent: int) -> Any:
    """Ranks whose last loss and sent bytes are given in place of those of the run."""

    def run(config: Any, *, num_ranks: int, **options: Any) -> list[Measured]:
        losses = [4.0, 3.0, 2.0, 1.0] if num_ranks == 2 else [2.0, loss]
        return [Measured(losses, (100, 50), (100, sent)) for _ in range(num_ranks)]

    return run


def test_resume_and_plan_of_a_recipe_hold() -> None:
    """Two ranks save, one resumes; bytes are those of the plan."""
    card = make_card(
        loaded(), subject="recipe tiny", command="nanotrain card", only=["resume", "plan"]
    )
    results = {check.name: check.result for check in card.checks}
    assert tuple(results) == CHECKS
    assert results["resume"] == results["plan"] == "holds"
    assert {results[name] for name in set(CHECKS) - {"resume", "plan"}} == {"not run"}
    assert card.holds and "left out by --only" in card.text()
    assert Card.from_json(card.to_json()) == card


def test_losses_of_a_resume_that_differ_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(card_module, "_run", fake_ranks(loss=1.001, sent=50))
    resume, plan = check_resume_and_plan(loaded())
    assert (resume.result, plan.result) == ("fails", "holds")


def test_bytes_that_were_not_planned_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(card_module, "_run", fake_ranks(loss=1.0, sent=51))
    resume, plan = check_resume_and_plan(loaded())
    assert (resume.result, plan.result) == ("holds", "fails")
    assert "51 bytes sent" in plan.text and "and 50" in plan.text


def test_a_layout_that_cannot_be_run_is_said_so_and_one_that_differs_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = []

    class Report:
        holds = False
        complaints = ("losses differ by 1.0e-01",)
        steps = (type("Step", (), {"loss_difference": 0.1}),)

    def parity(loaded: Loaded, world_size: int, **options: Any) -> Any:
        parallel = loaded.config.parallel
        seen.append(parallel)
        if parallel.expert_model_parallel_size == 2:
            raise ConfigError("no experts", why="the model is dense")
        return Report

    monkeypatch.setattr(card_module, "check_parity", parity)
    (check,) = check_layouts(loaded())
    assert check.result == "fails" and len(seen) == len(LAYOUTS)
    assert "ep 2 not run: no experts: the model is dense" in check.text
    assert "tp 2 with sequence parallelism NOT EQUAL: losses differ by 1.0e-01" in check.text


@pytest.mark.parametrize("num_run", [1, 4])
def test_layouts_say_how_many_were_run(num_run: int, monkeypatch: pytest.MonkeyPatch) -> None:
    class Report:
        holds = True
        steps = (type("Step", (), {"loss_difference": 0.0}),)

    calls: list[Any] = []

    def parity(*args: Any, **options: Any) -> Any:
        calls.append(args)
        if len(calls) > num_run:
            raise ConfigError("no")
        return Report

    monkeypatch.setattr(card_module, "check_parity", parity)
    (check,) = check_layouts(loaded())
    assert check.result == "holds" and check.text.startswith(f"{num_run} of 5 run: dp 2")
    assert check.text.count(" not run: ") == len(LAYOUTS) - num_run


@pytest.mark.parametrize(
    ("results", "holds"),
    [
        (("not run", "not run"), False),
        (("not run", "holds"), True),
        (("fails", "holds"), False),
        ((), False),
    ],
)
def test_a_card_holds_if_a_check_was_run_and_none_fails(
    results: tuple[card_module.Result, ...], holds: bool
) -> None:
    checks = tuple(Check("plan", result, "", {}) for result in results)
    assert Card("recipe x", "", "", {}, {}, checks).holds is holds


def test_without_any_layout_the_check_was_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def parity(*args: Any, **options: Any) -> Any:
        raise ConfigError("no")

    monkeypatch.setattr(card_module, "check_parity", parity)
    (check,) = check_layouts(loaded())
    assert check.result == "not run" and check.text.startswith("0 of 5 run: ")


def test_a_conversion_that_is_wrong_fails_the_card() -> None:
    with restored_tables():
        fixed = {"apply_layernorm_1p": True}
        wrong = replace(FAMILIES["llama"], fixed=fixed)
        (trip, same) = card_module.conversion_of_family("llama")
        assert (trip.result, same.result) == ("holds", "holds")
        FAMILIES["llama"] = wrong
        (trip, same) = card_module.conversion_of_family("llama")
    assert same.result == "fails"
    card = Card("family llama", "", "", {}, {}, (trip, same))
    assert not card.holds


def committed() -> Iterator[tuple[str, Card]]:
    """The committed cards of recipes."""
    for path in sorted(CARDS.glob("*.json")):
        if path.name != "families.json":
            yield path.stem, Card.from_json(path.read_text())


def test_committed_cards_are_those_of_the_recipes_as_they_are() -> None:
    """Fields and tiny models, not times: a card of another model or form is made anew."""
    names = []
    for name, card in committed():
        again = f"run: {card.command}"
        assert card.subject == f"recipe {name}" and card.date and card.holds, again
        assert card.command == f"nanotrain card +config={name} --output docs/cards"
        assert card.versions.keys() == {"nanotrain", "torch", "transformers"}, again
        assert tuple(check.name for check in card.checks) == CHECKS, again
        twin = flat_values(twin_config(load([f"+config={name}"]).config.model))
        assert card.twin == {size: twin[size] for size in SIZES}, again
        assert (CARDS / f"{name}.md").read_text() == card.text(), again
        names.append(name)
    assert {"tiny", "tiny_moe"} <= set(names)


def test_the_committed_checks_of_families_have_the_fields_of_today() -> None:
    content = read_families()
    assert content["families"].keys() <= FAMILIES.keys()
    wanted = {field.name for field in fields(Check)}
    for checks in content["families"].values():
        assert [check["name"] for check in checks] == list(BESIDE_TRANSFORMERS)
        assert all(check.keys() == wanted and check["text"] for check in checks)


def test_a_card_is_a_table(tmp_path: Path) -> None:
    checks = (Check("plan", "not run", "no reason", {}),)
    card = Card(
        "recipe x", "nanotrain card", "2026-01-02", {"torch": "2"}, {"num_layers": 2}, checks
    )
    assert card.text() == (
        "# recipe x\n\n    nanotrain card\n\n2026-01-02, torch 2. A tiny model of the same structure "
        "on CPUs: num_layers 2.\n\n| check | result | |\n|---|---|---|\n"
        "| plan | not run | no reason |\n"
    )
