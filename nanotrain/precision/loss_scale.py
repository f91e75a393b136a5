"""Loss scale of fp16 training, which keeps small gradients from underflow.

The loss is multiplied by `scale` before the backward pass; gradients are divided by it before the
update. A step whose gradients overflow is skipped on every rank. `hysteresis` overflows halve the
scale; `loss_scale_window` consecutive steps without overflow double it. It is constant if the
option `loss_scale` is set; fp32 and bf16 runs use the same class with a constant scale of 1.

A dynamic scale and its counters are on the device, so that the host waits in no step.

Source: Micikevicius et al. 2018, "Mixed Precision Training", section 3.2.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from nanotrain.config.config import PrecisionConfig


class LossScale:
    """A loss scale and the counters that change it.

    Args:
        config: dtype of the parameters, initial and smallest scale, window and hysteresis.
        device: device of a dynamic scale.
    """

    def __init__(self, config: PrecisionConfig, device: torch.device | str = "cpu") -> None:
        is_fp16 = config.params_dtype == "fp16"
        self.is_dynamic = is_fp16 and not config.loss_scale
        self.minimum = config.min_loss_scale
        self._config = config
        self._device = torch.device(device)
        self._constant = config.loss_scale if is_fp16 else 1.0
        self._set(config.initial_loss_scale, clean_steps=0, overflows_left=config.hysteresis)

    def _set(self, scale: float, *, clean_steps: int, overflows_left: int) -> None:
        """Put the scale and its counters on the device."""
        device = self._device
        self._scale = torch.tensor(scale, dtype=torch.float64, device=device)
        self._clean_steps = torch.tensor(clean_steps, device=device)
        self._overflows_left = torch.tensor(overflows_left, device=device)
        self._remember_state()

    def _remember_state(self) -> None:
        """Note the state before a step; updates replace the tensors."""
        self._earlier = (self._scale, self._clean_steps, self._overflows_left)

    @property
    def scale(self) -> float | Tensor:
        """Factor of the loss: a number if constant, else an fp64 scalar that updates replace."""
        if self.is_dynamic:
            return self._scale
        return self._constant

    def update(self, found_inf: Tensor) -> None:
        """Count one step; halve the scale after overflows, double it after a window without any.

        Args:
            found_inf: a scalar, 1 if a gradient overflowed, else 0.
        """
        if not self.is_dynamic:
            return
        self._remember_state()
        overflowed = found_inf > 0
        overflows_left = self._overflows_left - overflowed.long()
        clean = torch.where(overflowed, 0, self._clean_steps + 1)
        halves = overflowed & (overflows_left <= 0)
        doubles = clean == self._config.loss_scale_window
        halved = (self._scale / 2).clamp(min=self.minimum)
        scale = torch.where(doubles, self._scale * 2, self._scale)
        self._scale = torch.where(halves, halved, scale)
        self._clean_steps = torch.where(doubles, 0, clean)
        self._overflows_left = torch.where(doubles, self._config.hysteresis, overflows_left)

    def take_back(self) -> None:
        """Uncount the last step, which is taken again."""
        self._scale, self._clean_steps, self._overflows_left = self._earlier

    def state_dict(self) -> dict[str, float]:
        """The state that a resumed run needs, as JSON; waits for the device."""
        return {
            "scale": float(self.scale),
            "is_dynamic": self.is_dynamic,
            "clean_steps": int(self._clean_steps),
            "overflows_left": int(self._overflows_left),
        }

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continue from a saved state.

        If only one of the two scales is dynamic, the initial scale stays.
        """
        # Checkpoints of format 1 lack the flag; a constant scale is 1 and never counts a step.
        scale = state["scale"]
        clean_steps = int(state["clean_steps"])
        overflows_left = int(state["overflows_left"])
        was_dynamic = state.get("is_dynamic", scale != 1.0 or clean_steps > 0)
        if self.is_dynamic and was_dynamic:
            self._set(scale, clean_steps=clean_steps, overflows_left=overflows_left)
