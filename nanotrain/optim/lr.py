"""The learning rate as a pure function of the samples consumed so far, so a change of batch size keeps the curve.

    lr |      ______                 warmup, then one of LR_DECAYS from lr down to min_lr
       |    _/      \\__             the step that begins with `consumed` samples uses lr_at(consumed)
       |  _/           \\___
       +-/------------------\\___    consumed samples

Source: Megatron-LM, `optimizer_param_scheduler.py`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from nanotrain.config.config import LRDecayStyle, OptimConfig, WSDDecayStyle

WSD_DECAYS: dict[WSDDecayStyle, Callable[[float], float]] = {
    WSDDecayStyle.linear: lambda done: 1.0 - done,
    WSDDecayStyle.cosine: lambda done: 0.5 * (math.cos(math.pi * done) + 1.0),
    WSDDecayStyle.exponential: lambda done: 2.0 * 0.5**done - 1.0,
    WSDDecayStyle.minus_sqrt: lambda done: 1.0 - math.sqrt(done),
}


@dataclass(frozen=True)
class LRSchedule:
    """A learning-rate curve over consumed samples.

    Attributes:
        optim: peak, end, style and warmup, in steps.
        samples_per_step: the global batch, which turns steps into samples.
        train_iters: the length of the decay where `optim` does not give one.
    """

    optim: OptimConfig
    samples_per_step: int
    train_iters: int

    @property
    def warmup_samples(self) -> int:
        """Samples over which the rate rises."""
        return self.optim.lr_warmup_iters * self.samples_per_step

    @property
    def decay_samples(self) -> int:
        """Samples after which the rate is at its end."""
        return (self.optim.lr_decay_iters or self.train_iters) * self.samples_per_step

    def lr_at(self, consumed_samples: int) -> float:
        """The rate of the step that begins after so many samples."""
        optim = self.optim
        if self.warmup_samples and consumed_samples <= self.warmup_samples:
            return optim.lr_warmup_init + (optim.lr - optim.lr_warmup_init) * consumed_samples / self.warmup_samples
        if optim.lr_decay_style is LRDecayStyle.constant:
            return optim.lr
        if consumed_samples > self.decay_samples:
            return optim.min_lr
        return LR_DECAYS[optim.lr_decay_style](self, consumed_samples)

    def between(self, coefficient: float) -> float:
        """The rate a share of the way from min_lr (0) to lr (1)."""
        return self.optim.min_lr + coefficient * (self.optim.lr - self.optim.min_lr)

    def decay_done(self, consumed_samples: int) -> float:
        """The share of the decay that is behind us."""
        return (consumed_samples - self.warmup_samples) / max(self.decay_samples - self.warmup_samples, 1)


def _linear(curve: LRSchedule, consumed: int) -> float:
    return curve.between(1.0 - curve.decay_done(consumed))


def _cosine(curve: LRSchedule, consumed: int) -> float:
    return curve.between(0.5 * (math.cos(math.pi * curve.decay_done(consumed)) + 1.0))


def _inverse_square_root(curve: LRSchedule, consumed: int) -> float:
    rate = curve.optim.lr * math.sqrt(max(curve.warmup_samples, 1)) / math.sqrt(max(consumed, 1))
    return max(curve.optim.min_lr, rate)


def _wsd(curve: LRSchedule, consumed: int) -> float:
    length = (curve.optim.lr_wsd_decay_iters or 0) * curve.samples_per_step
    start = curve.decay_samples - length
    if consumed <= start:
        return curve.optim.lr
    return curve.between(WSD_DECAYS[curve.optim.lr_wsd_decay_style]((consumed - start) / length))


LR_DECAYS: dict[LRDecayStyle, Callable[[LRSchedule, int], float]] = {
    LRDecayStyle.linear: _linear,
    LRDecayStyle.cosine: _cosine,
    LRDecayStyle.inverse_square_root: _inverse_square_root,
    LRDecayStyle.WSD: _wsd,
}
