"""Schedules of learning rate and weight decay: pure functions of the consumed samples.

They do not depend on the batch size.

    lr |      ______                 warmup, then one of LR_DECAYS from lr to min_lr
       |    _/      \\__
       |  _/           \\___
       +-/------------------\\___    consumed samples at the start of the step

Weight decay is constant, or grows over the whole run by one of WEIGHT_DECAY_INCREASES.

Source: Megatron-LM, `optimizer_param_scheduler.py`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from nanotrain.config.config import OptimConfig
from nanotrain.config.optim import WeightDecayStyle, WSDDecayStyle

WSD_DECAYS: dict[WSDDecayStyle, Callable[[float], float]] = {
    "linear": lambda done: 1.0 - done,
    "cosine": lambda done: 0.5 * (math.cos(math.pi * done) + 1.0),
    "exponential": lambda done: 2.0 * 0.5**done - 1.0,
    "minus_sqrt": lambda done: 1.0 - math.sqrt(done),
}


# The fraction of the increase from start_weight_decay to end_weight_decay, by the completed
# fraction of the run.
WEIGHT_DECAY_INCREASES: dict[WeightDecayStyle, Callable[[float], float]] = {
    "linear": lambda done: done,
    "cosine": lambda done: 0.5 * (math.cos(math.pi * (1.0 - done)) + 1.0),
}


@dataclass(frozen=True)
class LRSchedule:
    """The schedules of a run over consumed samples."""

    # lr, min_lr, decay style, and warmup and decay in steps, samples or a fraction
    optim: OptimConfig
    samples_per_step: int  # global batch size; converts steps to samples
    # samples of the run, the length of the schedule unless the configuration sets another
    train_samples: int

    @property
    def warmup_samples(self) -> float:
        """Samples of the warmup; not a whole number if it is a fraction of the schedule."""
        if self.optim.lr_warmup_fraction is not None:
            return self.optim.lr_warmup_fraction * self.decay_samples
        if self.optim.lr_warmup_samples is not None:
            return self.optim.lr_warmup_samples
        return self.optim.lr_warmup_iters * self.samples_per_step

    @property
    def decay_samples(self) -> int:
        """Samples after which the learning rate is min_lr."""
        if self.optim.lr_decay_samples is not None:
            return self.optim.lr_decay_samples
        iters = self.optim.lr_decay_iters
        return self.train_samples if iters is None else iters * self.samples_per_step

    def lr_at(self, consumed_samples: int) -> float:
        """Learning rate of the step that starts at `consumed_samples`."""
        optim = self.optim
        if self.warmup_samples and consumed_samples <= self.warmup_samples:
            increase = optim.lr - optim.lr_warmup_init
            return optim.lr_warmup_init + increase * consumed_samples / self.warmup_samples
        if optim.lr_decay_style != "constant" and consumed_samples > self.decay_samples:
            return optim.min_lr
        decay = LR_DECAYS[optim.lr_decay_style]
        return decay(self, consumed_samples)

    def decoupled_lr_at(self, consumed_samples: int) -> float | None:
        """Learning rate of the embedding and the output layer; None without `--decoupled-lr`.

        It warms up from `lr_warmup_init` to `decoupled_lr` and decays to `decoupled_min_lr`, in the
        style of `lr`.
        """
        optim = self.optim
        if optim.decoupled_lr is None:
            return None
        min_lr = optim.min_lr if optim.decoupled_min_lr is None else optim.decoupled_min_lr
        decoupled = replace(optim, lr=optim.decoupled_lr, min_lr=min_lr)
        return replace(self, optim=decoupled).lr_at(consumed_samples)

    def weight_decay_at(self, consumed_samples: int) -> float:
        """Weight decay of the step that starts at `consumed_samples`."""
        start = self.optim.start_weight_decay
        end = self.optim.end_weight_decay
        style = self.optim.weight_decay_incr_style
        if style == "constant" or start is None or end is None:
            return self.optim.weight_decay
        done = min(consumed_samples / self.train_samples, 1.0)
        return start + WEIGHT_DECAY_INCREASES[style](done) * (end - start)

    def interpolate(self, coefficient: float) -> float:
        """Interpolate between min_lr (0) and lr (1)."""
        return self.optim.min_lr + coefficient * (self.optim.lr - self.optim.min_lr)

    def decay_done(self, consumed_samples: int) -> float:
        """Completed fraction of the decay."""
        length = self.decay_samples - self.warmup_samples
        return (consumed_samples - self.warmup_samples) / max(length, 1)


def _constant(schedule: LRSchedule, consumed: int) -> float:
    return schedule.optim.lr


def _linear(schedule: LRSchedule, consumed: int) -> float:
    return schedule.interpolate(WSD_DECAYS["linear"](schedule.decay_done(consumed)))


def _cosine(schedule: LRSchedule, consumed: int) -> float:
    return schedule.interpolate(WSD_DECAYS["cosine"](schedule.decay_done(consumed)))


def _inverse_square_root(schedule: LRSchedule, consumed: int) -> float:
    """A rate that falls with the root of the samples after the warmup."""
    warmup = math.sqrt(max(schedule.warmup_samples, 1))
    rate = schedule.optim.lr * warmup / math.sqrt(max(consumed, 1))
    return max(schedule.optim.min_lr, rate)


def _warmup_stable_decay(schedule: LRSchedule, consumed: int) -> float:
    """The constant rate, then its decay over the last samples."""
    optim = schedule.optim
    length = optim.lr_wsd_decay_samples
    if length is None:
        iters = optim.lr_wsd_decay_iters or 0
        length = iters * schedule.samples_per_step
    start = schedule.decay_samples - length
    if consumed <= start:
        return optim.lr
    decay = WSD_DECAYS[optim.lr_wsd_decay_style]
    return schedule.interpolate(decay((consumed - start) / length))


# The values of --lr-decay-style: the learning rate of a step that starts at these consumed samples,
# between the warmup and the end of the decay.
LR_DECAYS: dict[str, Callable[[LRSchedule, int], float]] = {
    "constant": _constant,
    "linear": _linear,
    "cosine": _cosine,
    "inverse-square-root": _inverse_square_root,
    "WSD": _warmup_stable_decay,
}
