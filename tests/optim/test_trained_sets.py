"""The sets of trained parameters of a run, and the updates that Adam counts."""

import json

import pytest

from nanotrain.optim.trained_sets import TrainedSets
from nanotrain.spec.trainable import TrainableSet

FROZEN = TrainableSet(freeze=("a",))


def test_updates_are_counted_from_the_set_that_trains_again() -> None:
    sets = TrainedSets(((0, FROZEN),)).then(TrainableSet(), num_updates=4)
    sets = sets.then(TrainableSet(freeze=("b",)), num_updates=6)
    assert [sets.first_update(name) for name in "acb"] == [4, 0, 6]
    again = sets.then(TrainableSet(), num_updates=9)
    assert [again.first_update(name) for name in "acb"] == [4, 0, 9]
    assert again.then(TrainableSet(), num_updates=12) is again


def test_a_set_that_trained_nothing_is_left_out() -> None:
    sets = TrainedSets().then(FROZEN, num_updates=3).then(TrainableSet(), num_updates=3)
    assert sets.sets == ((0, TrainableSet()), (3, TrainableSet()))
    assert sets.first_update("a") == 0


def test_a_checkpoint_has_an_entry_only_where_parameters_were_frozen() -> None:
    assert TrainedSets().to_json() == {}
    assert TrainedSets.from_json({}) == TrainedSets()
    sets = TrainedSets(((0, FROZEN), (2, TrainableSet(train_only=("b.*",)))))
    assert TrainedSets.from_json(json.loads(json.dumps(sets.to_json()))) == sets


@pytest.mark.parametrize(
    "saved",
    [7, [], [3], [{"num_updates": -1, "freeze": [], "train_only": []}], [{"num_updates": 0}]],
)
def test_other_entries_are_refused(saved: object) -> None:
    with pytest.raises(ValueError, match=r"objects\.optimizer\.trained_sets"):
        TrainedSets.from_json({"trained_sets": saved})
