"""Hugging Face folders: config.json to and from a model configuration, weights to and from
parameters.

Not here: tokenizers (data/) and checkpoints of training runs (checkpoint/).
"""
