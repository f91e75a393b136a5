"""Checkpoints of other frameworks: Hugging Face folders in and out, Megatron-LM and torch DCP out.

It holds no training code: it reads and writes files through `checkpoint/`.
"""
