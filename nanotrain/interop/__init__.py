"""Checkpoints of other frameworks.

    hf/           Hugging Face folders, in and out
    megatron/     Megatron-LM's `torch_dist` checkpoints, in and out
    dcp/          torch.distributed.checkpoint, out, and its files for both

It holds no training code: it reads and writes files through `checkpoint/`.
"""
