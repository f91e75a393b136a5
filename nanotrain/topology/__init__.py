"""Pure plans: ranks and groups, boxes, parameter declarations, pipeline stages, hardware peaks.

No torch, no process group and no device: `comm/` creates the live groups, `model/` and `parallel/` the tensors.
"""
