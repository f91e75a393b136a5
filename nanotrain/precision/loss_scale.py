"""The factor that keeps fp16 gradients from vanishing (Micikevicius et al. 2018, section 3.2).

The loss is multiplied by `scale` before the backward pass and gradients are divided by it before the update. A
step whose gradients overflow is skipped on every rank; `hysteresis` such steps halve the scale, and
`loss_scale_window` clean steps in a row double it. fp32 and bf16 runs use the same class with a scale that
stays 1.
"""

from dataclasses import dataclass

from nanotrain.config.config import DType, PrecisionConfig


@dataclass
class LossScale:
    """A loss scale and the counters that move it.

    Attributes:
        scale: what the loss is multiplied by.
        is_dynamic: whether overflows and clean steps move the scale.
        clean_steps: steps without overflow since the scale last moved.
        overflows_left: overflows that are still borne before the scale halves.
    """

    scale: float
    is_dynamic: bool
    minimum: float
    window: int
    hysteresis: int
    clean_steps: int = 0
    overflows_left: int = 0

    @classmethod
    def of(cls, config: PrecisionConfig) -> "LossScale":
        """The loss scale that a precision section asks for."""
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
        """Account for one step."""
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

    def state(self) -> dict[str, float]:
        """What resuming needs, as JSON."""
        return {"scale": self.scale, "clean_steps": self.clean_steps, "overflows_left": self.overflows_left}

    def load_state(self, state: dict[str, float]) -> None:
        """Take up a saved state; a run whose precision needs no scale keeps its 1."""
        if self.is_dynamic:
            self.scale = state["scale"]
            self.clean_steps, self.overflows_left = int(state["clean_steps"]), int(state["overflows_left"])
