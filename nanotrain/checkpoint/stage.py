"""Copy the tensors that a rank saves to host memory, so that training continues while they are written.

The copy has the size of the rank's shard. Its memory is allocated at the first save and used again by the next ones;
on a GPU it is pinned, so that copies run at the speed of the bus. A tensor is copied in chunks of at most
`plan.CHUNK_BYTES`, which bounds the temporary memory of tensors that are not contiguous.
"""

from collections.abc import Mapping

import torch

from nanotrain.checkpoint.plan import split_box
from nanotrain.comm.device import synchronize
from nanotrain.spec.boxes import TensorBox


class StagingBuffers:
    """Host copies of the tensors that a rank saves."""

    def __init__(self) -> None:
        self._copies: dict[TensorBox, torch.Tensor] = {}

    def copy(self, tensors: Mapping[TensorBox, torch.Tensor]) -> dict[TensorBox, torch.Tensor]:
        """Copy tensors to the host; complete on return, valid until the next call.

        Args:
            tensors: box -> tensor of the box's shape, on any device.

        Returns:
            box -> contiguous tensor in host memory.
        """
        copies = {box: self._copy_of(box, tensor) for box, tensor in tensors.items()}
        for box, tensor in tensors.items():
            for chunk in split_box(box.box, tensor.element_size()):
                index = chunk.within(box.box).slices()
                copies[box][index].copy_(tensor.detach()[index], non_blocking=True)
        for device in {tensor.device for tensor in tensors.values()}:
            synchronize(device)
        self._copies = copies  # releases the memory of tensors that are not saved any more
        return copies

    def _copy_of(self, box: TensorBox, tensor: torch.Tensor) -> torch.Tensor:
        held = self._copies.get(box)
        if held is not None and (held.shape, held.dtype) == (tensor.shape, tensor.dtype):
            return held
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")
