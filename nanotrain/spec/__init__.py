"""The model as data: boxes of tensors, parameter declarations, derived sizes, pipeline stages,
counts.

It holds no torch: what a rank has is known before any process group, module or device exists.
"""
