"""What is logged during a test, as in tests/train."""

from tests.train.conftest import logged

__all__ = ["logged"]
