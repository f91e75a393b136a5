"""Block transforms that exchange compute for memory or speed: compilation today. Recomputation and offload belong here.

Storage of parameters and gradients is in `parallel/dp/`, the precision of tensors in `precision/`.
"""
