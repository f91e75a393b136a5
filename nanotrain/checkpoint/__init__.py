"""Checkpoints: boxes of global tensors in one safetensors file a rank, and a manifest that says where each lies."""
