"""The matrix products of linear layers, dense and grouped, and the queue that defers weight
gradients.

No communication and no modules: the layers that call these products are in `parallel/tp` and
`parallel/ep`.
"""
