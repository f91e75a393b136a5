"""`TrainedSets`: the sets of trained parameters of a run, and the update from which each applied.

Adam's bias correction counts the updates of a parameter. A parameter that was frozen begins at
zero again, so its updates are counted from the set that includes it again.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

from nanotrain.spec.trainable import TrainableSet
from nanotrain.untrusted import list_of, object_of, text_of, whole_number


@dataclass(frozen=True)
class TrainedSets:
    """Sets in the order of training, each with the number of updates before it."""

    sets: tuple[tuple[int, TrainableSet], ...] = ((0, TrainableSet()),)

    @property
    def last(self) -> TrainableSet:
        """The set that applies now."""
        return self.sets[-1][1]

    def then(self, trainable: TrainableSet, *, num_updates: int) -> Self:
        """These sets and the one of a run that goes on after `num_updates` updates."""
        if trainable == self.last:
            return self
        before = tuple(entry for entry in self.sets if entry[0] < num_updates)
        return type(self)((*before, (num_updates, trainable)))

    def first_update(self, name: str) -> int:
        """The number of updates before the parameter was trained without a break.

        >>> sets = TrainedSets(((0, TrainableSet(freeze=("a",))), (5, TrainableSet())))
        >>> sets.first_update("a"), sets.first_update("b")
        (5, 0)
        """
        first = self.sets[-1][0]
        for num_updates, trainable in reversed(self.sets):
            if not trainable.includes(name):
                break
            first = num_updates
        return first

    def to_json(self) -> dict[str, Any]:
        """The entry of a checkpoint; empty if all parameters have always been trained."""
        if self == TrainedSets():
            return {}
        entries = []
        for num_updates, trainable in self.sets:
            patterns = {"freeze": [*trainable.freeze], "train_only": [*trainable.train_only]}
            entries.append({"num_updates": num_updates, **patterns})
        return {"trained_sets": entries}

    @classmethod
    def from_json(cls, state: Mapping[str, Any]) -> Self:
        """The sets of a checkpoint.

        Raises:
            ValueError: it was not written by `to_json`.
        """
        if "trained_sets" not in state:
            return cls()
        where = "objects.optimizer.trained_sets"
        sets = []
        for saved in list_of(state["trained_sets"], where):
            entry = object_of(saved, where)
            trainable = TrainableSet(
                tuple(_patterns(entry, "freeze")), tuple(_patterns(entry, "train_only"))
            )
            sets.append((whole_number(entry.get("num_updates"), where), trainable))
        if not sets:
            raise ValueError(f"{where} is empty")
        return cls(tuple(sets))


def _patterns(entry: Mapping[str, Any], name: str) -> Iterator[str]:
    where = f"objects.optimizer.trained_sets.{name}"
    for pattern in list_of(entry.get(name), where):
        yield text_of(pattern, where)
