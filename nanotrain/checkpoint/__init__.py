"""Checkpoints: chunks of global tensors in one safetensors file per rank, and a manifest that lists
where each lies.

What is saved and when is `nanotrain.train`; Hugging Face files are `nanotrain.interop.hf`.
"""
