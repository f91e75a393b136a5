"""Number formats.

    dtypes.py       the table of dtypes, and which format each kind of tensor has
    fp8.py          the formats and recipes of fp8
    loss_scale.py   the loss scale of fp16

It holds no tensors and no arithmetic; fp8 products are in `kernels/fp8`.
"""
