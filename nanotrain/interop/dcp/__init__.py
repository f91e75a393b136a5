"""Checkpoints of torch.distributed.checkpoint.

export.py    a checkpoint of ours for `dcp.load`
pickles.py   pickles of other programs, read without running anything
tensors.py   boxes of the tensors of a folder

Megatron-LM's `torch_dist` format is such a folder too.
"""
