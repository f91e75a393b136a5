"""fp8 matrix products behind the same interface as those of bf16.

Which tensors are fp8 and how they are scaled is `precision/fp8.py`.

quantize.py    amaxes, scales, and the cast to fp8
triton_cast.py the same in kernels, one read per operand
scaled_mm.py   the products of quantized matrices: torch's kernels on CUDA, an emulation elsewhere
layer.py       what a layer keeps: its options, its amax history, and how amaxes are reduced over ranks
products.py    {fprop, dgrad, wgrad} of dense linear layers
grouped.py     the same of stacked experts; triton_grouped.py is the kernel of those that torch lacks
"""
