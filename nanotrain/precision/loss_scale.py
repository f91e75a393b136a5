"""Loss scale of fp16 training, which keeps small gradients from underflow (Micikevicius et al. 2018, section 3.2).

The loss is multiplied by `scale` before the backward pass; gradients are divided by it before the update. A step
whose gradients overflow is skipped on every rank. `hysteresis` overflows halve the scale; `loss_scale_window`
consecutive steps without overflow double it. fp32 and bf16 runs use the same class with a constant scale of 1.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from nanotrain.config.config import DType, PrecisionConfig


@dataclass
class LossScale:
    """A loss scale and the counters that change it."""

    scale: float  # factor of the loss
    is_dynamic: bool  # whether overflows and steps without overflow change the scale
    minimum: float  # smallest scale
    window: int  # steps without overflow after which the scale doubles
    hysteresis: int  # overflows after which the scale halves
    clean_steps: int = 0  # steps without overflow since the last overflow or change
    overflows_left: int = 0  # overflows until the scale halves

    @classmethod
    def of(cls, config: PrecisionConfig) -> "LossScale":
        """The initial loss scale of a `precision` config section."""
        is_dynamic = config.params_dtype is DType.fp16
        return cls(
            scale=config.initial_loss_scale if is_dynamic else 1.0,
            is_dynamic=is_dynamic,
            minimum=config.min_loss_scale,
            window=config.loss_scale_window,
            hysteresis=config.hysteresis,
            overflows_left=config.hysteresis,
        )

    def update(self, *, overflowed: bool) -> None:
        """Count one step."""
        if not self.is_dynamic:
            return
        if overflowed:
            self.clean_steps = 0
            self.overflows_left -= 1
            if self.overflows_left <= 0:
                self.scale = max(self.scale / 2, self.minimum)
            return
        self.clean_steps += 1
        if self.clean_steps == self.window:
            self.clean_steps, self.overflows_left = 0, self.hysteresis
            self.scale *= 2

    def state_dict(self) -> dict[str, float]:
        """The state that a resumed run needs, as JSON."""
        return {
            "scale": self.scale,
            "is_dynamic": self.is_dynamic,
            "clean_steps": self.clean_steps,
            "overflows_left": self.overflows_left,
        }

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continue from a saved state; between a constant and a dynamic scale the initial scale stays."""
        # Checkpoints of format 1 lack the flag; a constant scale is 1 and never counts a step.
        was_dynamic = state.get("is_dynamic", state["scale"] != 1.0 or state["clean_steps"] > 0)
        if self.is_dynamic and was_dynamic:
            self.scale = state["scale"]
            self.clean_steps, self.overflows_left = int(state["clean_steps"]), int(state["overflows_left"])
