"""The interface of an experiment tracker."""

from typing import Any, Protocol


class Tracker(Protocol):
    """An experiment tracker."""

    def write(self, step: int, values: dict[str, Any]) -> None:
        """Record the metrics of one step.

        Args:
            step: step of the training.
            values: numbers, and lists of numbers, such as the tokens of every expert.
        """

    def close(self, *, failed: bool) -> None:
        """Flush and close. `failed` if an error ended the run."""
