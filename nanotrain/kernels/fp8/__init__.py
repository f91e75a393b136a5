"""fp8 matrix products, with the interface of the bf16 products.

Which tensors are fp8 and how they are scaled is `precision/fp8.py`.

quantize.py         amaxes, scales, and the cast to fp8
scaled_mm.py        products of quantized matrices: torch's kernels on CUDA, an emulation elsewhere
layer.py            options and amax history of a layer; amaxes reduced over ranks
products.py         fprop, dgrad and wgrad of dense linear layers
swiglu.py, norm.py  products whose casts compute their input
grouped.py          fprop, dgrad and wgrad of stacked experts
triton_cast.py      the cast in one kernel, with one read per operand
triton_grouped.py   products of experts that torch lacks
triton_nvfp4*.py    casts to NVFP4 of matrices, and casts and products of experts
triton_tiles.py     the rows of experts in tiles, for both kernels
"""
