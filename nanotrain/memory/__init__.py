"""What trades compute for memory or speed inside a transformer block: recomputation, offloading and compilation.

Storage of parameters and gradients is in `parallel/dp/`, the precision of tensors in `precision/`.
"""
