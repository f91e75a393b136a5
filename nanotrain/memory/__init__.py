"""Transforms of transformer blocks that exchange compute for memory or speed: compilation, offload,
recomputation.

Storage of parameters and gradients is in `parallel/dp/`, the precision of tensors in `precision/`.
"""
