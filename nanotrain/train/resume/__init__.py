"""Resume from a checkpoint: restore the state of a run, or roll back to before a spike of the loss.

Files and formats of checkpoints are in `nanotrain/checkpoint`.
"""
