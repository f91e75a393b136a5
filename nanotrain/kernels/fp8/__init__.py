"""fp8 matrix products behind the same interface as those of bf16.

Which tensors are fp8 and how they are scaled is `precision/fp8.py`; amaxes are reduced over ranks in `model/fp8.py`.

quantize.py    amaxes, scales, and the cast to fp8
scaled_mm.py   the product of two quantized matrices: torch's kernel on CUDA, an emulation elsewhere
layer.py       what a layer keeps: its options and its amax history
products.py    {fprop, dgrad, wgrad} of dense linear layers
grouped.py     the same of stacked experts, with scaled_grouped_mm.py: the products of all of them in one
"""
