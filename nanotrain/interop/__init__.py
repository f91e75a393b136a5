"""Checkpoints of other frameworks: Hugging Face folders in and out, Megatron-LM and torch DCP out."""
