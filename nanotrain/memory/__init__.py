"""Transforms of transformer blocks that exchange compute for memory or speed.

    block_transforms.py   all of them, in the one order in which they are applied
    recompute.py          parts that are computed again in the backward
    offload.py            saved tensors in host memory between forward and backward

Storage of parameters and gradients is in `parallel/dp/`, the precision of tensors in `precision/`.
"""
