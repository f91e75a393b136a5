"""A training run: its entry point, inputs, plan, parts, step and loop; what happens around the
steps is in `hooks/`.

It holds no model, storage or communication code: `build.py` assembles those of the packages below.
"""
