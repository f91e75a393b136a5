"""Load a model from a checkpoint, generate text, export to Hugging Face.

Runs on one process without a training run; training and its hooks are in train/.
"""
