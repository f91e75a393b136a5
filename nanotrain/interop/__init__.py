"""Checkpoints of other frameworks.

    hf/           Hugging Face folders, in and out
    megatron.py   Megatron-LM's `torch_dist` checkpoints, out; megatron_limits.py has the models
                  that they cannot represent
    dcp.py        torch.distributed.checkpoint, out

It holds no training code: it reads and writes files through `checkpoint/`.
"""
