"""Optimization: update rules, the distributed optimizer that applies one to shards, clipping, learning-rate schedules.

It holds main params and optimizer state; buffers, gradient reduction and the parameter all-gather are in
`nanotrain.parallel.dp`.
"""
