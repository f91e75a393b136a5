"""Peak memory of the heaviest rank, by kind."""

from dataclasses import dataclass


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of the heaviest rank at the peak."""

    params: int  # model parameters, gathered units included
    grads: int  # gradients
    optimizer: int  # main parameters and optimizer state
    activations: int  # what autograd keeps of the microbatches in flight
    buffers: int  # buckets in flight
    working: int  # temporaries of the operator at the peak
    overhead: int  # CUDA context, NCCL and fragmentation
    pp_index: int  # the heaviest pipeline rank
    capacity: int  # bytes that a process can use

    @property
    def total(self) -> int:
        """Peak of the allocated bytes."""
        tensors = self.params + self.grads + self.optimizer
        return tensors + self.activations + self.buffers + self.working

    @property
    def reserved(self) -> int:
        """With what is not allocated by tensors."""
        return self.total + self.overhead

    @property
    def headroom(self) -> int:
        """Bytes that are left; negative where it does not fit."""
        return self.capacity - self.reserved

    @property
    def fits(self) -> bool:
        """Whether the GPU holds it."""
        return self.headroom >= 0
