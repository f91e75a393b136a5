"""Tensor and sequence parallelism: linear layers, embedding and loss with weights sharded over the
tp group.

No model code and no matrix products of its own: layers take their parameters, products are those of
`kernels/`.
"""
