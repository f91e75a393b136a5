"""Data parallelism: parameters and gradients of a module in flat buffers, reduced and all-gathered
per bucket.

It holds the buffer layout, the stores of a bucket and their collectives; update rules and optimizer
state are in `nanotrain.optim`, and which ranks form a group is decided in `nanotrain.topology`.
"""
