"""The planner: bytes and time of a run on many GPUs, and its best layout, without a device.

Not here: exact bytes of parameters and activations of nanotrain's own ranks (plan/).
"""
