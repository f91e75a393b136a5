"""A `DataError` on its way between processes, as plain values: exceptions would arrive with a foreign traceback."""

from dataclasses import dataclass

from nanotrain.errors import DataError


@dataclass(frozen=True)
class Failure:
    """What a worker could not do."""

    what: str
    why: str
    fix: str

    @classmethod
    def of(cls, error: DataError) -> "Failure":
        """Pack an error, in the worker."""
        return cls(error.what, error.why, error.fix)

    def error(self) -> DataError:
        """Unpack it, in the process that asked."""
        return DataError(self.what, why=self.why, fix=self.fix)
