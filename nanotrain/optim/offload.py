"""`--optimizer-cpu-offload`: parts of the main params and state are stored and updated on the host.

    device         |scale grads|  update the other parts         |        wait for the copies
    side stream      grads of part 0, 1, 2 ->          params of part 0, 1 ->
    host                          | update part 0 | update part 1 | update part 2 |

The rule is computed on the host; gradients and parameters are copied without a conversion.

Source: Ren et al. 2021 (ZeRO-Offload), section 4.
"""

from collections.abc import Sequence

import torch

from nanotrain.comm.device import Copy, HostTransfer
from nanotrain.optim.rule import UpdateRule, UpdateStep
from nanotrain.optim.state import PartState


class HostUpdate:
    """Updates some ranges of the optimizer on the host, while the device updates the rest.

    Args:
        parts: parts with state in host memory, at least one.
        device: device of gradients and model params.
    """

    def __init__(self, parts: Sequence[PartState], *, device: torch.device) -> None:
        self._parts = [(part, part.host) for part in parts if part.host is not None]
        self._copies = HostTransfer(device)
        self._arrivals: list[Copy] = []

    def start_grads(self) -> None:
        """Start to copy the gradients of all parts to the host."""
        self._copies.wait_for_device()
        self._arrivals = []
        for part, host in self._parts:
            self._arrivals.append(self._copies.start(part.grad, host.device_grad))

    def wait_for_grads(self) -> None:
        """Wait until the gradients of all parts are on the host."""
        for arrival in self._arrivals:
            arrival.wait_on_host()

    def run(self, rule: UpdateRule, step: UpdateStep) -> None:
        """Update each part once its gradients have arrived, and copy its params to the device.

        `MatrixUpdate` has updated the parts of matrices before. The device's stream waits for the
        copies. The buffers of a part can be reused at once: on the copy stream the parameter copies
        of the previous step precede the gradient copies of this one.
        """
        for (part, host), arrival in zip(self._parts, self._arrivals, strict=True):
            arrival.wait_on_host()
            if not part.part.is_matrix:
                part.update(rule, step)
            part.main_in_chunks_to(host.params)
            self._copies.start(part.model_params, host.params)
        self._copies.finish()
