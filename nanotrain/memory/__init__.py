"""Transforms of transformer blocks that exchange compute for memory or speed.

    block_transforms.py   all of them, in the one order in which they are applied
    recompute.py          functions that are computed again in the backward
    recompute_modules.py  recomputation of the functions of a block
    recomputed_pairs.py   these functions, by module
    cuda_graphs.py        parts of blocks as CUDA graphs
    graph_parts.py        these parts, by scope
    static_inputs.py      static copies of what graphs read
    offload.py            saved tensors in host memory between forward and backward

Storage of parameters and gradients is in `parallel/dp/`, the precision of tensors in `precision/`.
"""
