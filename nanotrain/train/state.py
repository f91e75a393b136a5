"""The counters of a run: all that resuming the data needs."""

from dataclasses import asdict, dataclass


@dataclass
class TrainState:
    """How far a run has come.

    Attributes:
        step: optimizer steps done, skipped ones too.
        consumed_samples: samples that all ranks together have read; the next global batch begins there.
        consumed_tokens: target tokens that counted in the loss.
        curve_batch_size: the global batch that the run began with: it turns the steps of the learning-rate curve into
            samples, so that another batch size after a resume goes on along the same curve.
    """

    step: int = 0
    consumed_samples: int = 0
    consumed_tokens: int = 0
    curve_batch_size: int = 0

    def advance(self, *, samples: int, tokens: int) -> None:
        """Account for one step."""
        self.step += 1
        self.consumed_samples += samples
        self.consumed_tokens += tokens

    def to_dict(self) -> dict[str, int]:
        """The counters as JSON."""
        return asdict(self)
