"""The sample from which a run reads changed data, and how far each corpus was read before.

    samples         0 ............ origin ............
    source a        0 1 2 ... 41   42 43 ...            goes on where it stopped
    source b        (not read)     0 1 2 ...            is new

`DataOrigin` is recorded in checkpoints and in data-order.jsonl: all samples after it follow from it
and from the settings.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from typing import Any

from nanotrain.data.batch import SampleDataset
from nanotrain.data.blend import BlendedDataset, StageBlend
from nanotrain.data.build import corpora_of
from nanotrain.untrusted import object_of, text_of, whole_number


@dataclass(frozen=True)
class DataOrigin:
    """The start of changed data."""

    sample: int  # the first sample of the changed data
    read: Mapping[str, int]  # samples of a corpus that were read before, by its prefix
    # new prefixes of corpora that were renamed, by the old ones
    moved: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def from_json(cls, value: object) -> "DataOrigin":
        """The origin in a checkpoint or a row of data-order.jsonl.

        Raises:
            ValueError: a field is missing or has an invalid value.
        """
        row = object_of(value, "origin")
        read = object_of(row.get("read"), "origin.read")
        moved = object_of(row.get("moved", {}), "origin.moved")
        return cls(
            whole_number(row.get("sample"), "origin.sample"),
            {name: whole_number(count, "origin.read") for name, count in read.items()},
            {name: text_of(prefix, "origin.moved") for name, prefix in moved.items()},
        )

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return asdict(self)


def continued(samples: SampleDataset, origin: DataOrigin | None) -> SampleDataset:
    """The training samples, read from an origin on.

    Args:
        samples: training samples, with stages at their starts in the run.
        origin: origin of the data; None for sample 0.
    """
    if origin is None:
        return samples
    if not isinstance(samples, BlendedDataset):
        samples = BlendedDataset([samples], [StageBlend("", 0, (0,), (Fraction(1),))])
    prefixes = [str(part.corpus.prefix) for part in corpora_of(samples)]
    read = [origin.read.get(prefix, 0) for prefix in prefixes]
    return samples.continued(origin.sample, read)
