"""Tensor and sequence parallelism: matrices, vocabulary and activations cut over the ranks of one tp group."""
