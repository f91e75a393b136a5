"""`--optimizer-cpu-offload`: parts of the main params and state are in host memory and are updated by the host.

    device         |scale grads|  update the other parts            |            wait for the copies
    side stream      grads of part 0, 1, 2 ->          params of part 0, 1 ->
    host                          | update part 0 | update part 1 | update part 2 |

Values are those of the same rule on the host; gradients and parameters are copied without a conversion.

Source: Ren et al. 2021 (ZeRO-Offload), section 4.
"""

from collections.abc import Callable, Sequence

import torch

from nanotrain.comm.device import BufferCopies, BufferCopy
from nanotrain.errors import ConfigError
from nanotrain.optim.state import HostBuffers, PartState


class HostUpdate:
    """Updates parts on the host, beside the device.

    Args:
        parts: with state in host memory.
        device: of gradients and model params.
    """

    def __init__(self, parts: Sequence[PartState], *, device: torch.device) -> None:
        self._parts = parts
        self._copies = BufferCopies(device) if parts else None
        self._arrivals: list[BufferCopy] = []

    @property
    def has_parts(self) -> bool:
        """Whether there is anything to update."""
        return self._copies is not None

    def start_grads(self) -> None:
        """Start to copy the gradients of all parts to the host."""
        if self._copies is not None:
            self._copies.wait_for_device()
            self._arrivals = [self._copies.start(part.grad, buffers_of(part).device_grad) for part in self._parts]

    def wait_for_grads(self) -> None:
        """Wait until the gradients of all parts are on the host."""
        for arrival in self._arrivals:
            arrival.wait_on_host()

    def run(self, update: Callable[[PartState], None]) -> None:
        """Update each part once its gradients have arrived, and copy its params to the device.

        The device's stream waits for the copies. The buffers of a part can be reused at once: on the copy stream the
        parameter copies of the previous step precede the gradient copies of this one.
        """
        if self._copies is None:
            return
        for part, arrival in zip(self._parts, self._arrivals, strict=True):
            arrival.wait_on_host()
            update(part)
            params = buffers_of(part).params
            part.main_in_chunks_to(params)
            self._copies.start(part.model_params, params)
        self._copies.finish()


def buffers_of(part: PartState) -> HostBuffers:
    """The buffers of a part on the host."""
    assert part.host is not None, "the part is on the device"
    return part.host


def require_gpu(device_type: str) -> None:
    """Check that offload has an effect.

    Raises:
        ConfigError: the device is a CPU.
    """
    if device_type == "cpu":
        raise ConfigError(
            "optimizer_cpu_offload has no effect",
            why="the device is a CPU: optimizer state is in host memory already",
            fix="leave out --optimizer-cpu-offload",
        )
