"""Tensor and sequence parallelism: weights sharded over the tp group.

    layers.py   column- and row-parallel linear layers, embedding
    loss.py     cross-entropy fused with the output layer, over a sharded vocabulary

Layers take their parameters from `model/` and their matrix products from `kernels/`.
"""
