"""Number formats: the table of dtypes, which format each kind of tensor has, and the loss scale of
fp16.

It holds no tensors and no arithmetic.
"""
