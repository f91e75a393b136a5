"""The log of nanotrain in tests of the run folder."""

from tests.train.conftest import logged

__all__ = ["logged"]
