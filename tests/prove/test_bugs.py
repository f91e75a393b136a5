"""The bugs of tests/prove/bugs.yaml, which `make prove` plants: each is at one place of the tree."""

from pathlib import Path
from types import ModuleType

import pytest

from nanotrain.errors import ScheduleError
from nanotrain.prove import check
from nanotrain.prove.axes import Untypable
from tests.scripts import load_script

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("prove")


def test_every_bug_is_planted_at_one_place(script: ModuleType) -> None:
    rows = list(script.planted())
    assert len({row["name"] for row in rows}) == len(rows)
    for row in rows:
        text = (ROOT / row["file"]).read_text()
        assert text.count(row["find"]) == 1, row["name"]
        compile(text.replace(row["find"], row["replace"]), row["file"], "exec")


def test_drawn_layouts_are_of_all_models(script: ModuleType) -> None:
    generator = script.random.Random(0)
    models = [f"+config={name}" for name in script.recipes()]
    lines = [script.draw(generator, models).line for _ in range(200)]
    assert {line.split()[0] for line in lines} == set(models)


def test_a_family_has_its_own_model(script: ModuleType) -> None:
    config = script.config_of(script.Layout("family=llama-tied --tensor-model-parallel-size 2", 4))
    assert not config.model.untie_embeddings_and_output_weights
    assert script.config_of(script.Layout("family=llama --tensor-model-parallel-size 3", 3)) is None


@pytest.mark.parametrize(
    ("error", "faults"), [(Untypable("no types"), ["no types"]), (ScheduleError("no form"), None)]
)
def test_a_layout_without_types_is_a_fault_and_one_without_a_schedule_is_not(
    script: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    faults: list[str] | None,
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(check, "prove", fail)
    assert script.faults_of(script.Layout("+config=tiny", 1)) == faults
