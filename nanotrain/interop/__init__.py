"""Checkpoints of other frameworks.

    hf/           Hugging Face folders, in and out
    megatron/     Megatron-LM's checkpoints, in and out
    dcp/          checkpoints of torch.distributed.checkpoint, in and out
    imported.py   what imports of runs have in common

It holds no training code: it reads and writes files through `checkpoint/`.
"""
