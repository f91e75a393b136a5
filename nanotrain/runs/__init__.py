"""The run folder: the paths of everything a run writes, and the description of the run.

Checkpoints and metrics are written by their own packages.
"""
