"""A run that goes on from a checkpoint: its state restored, or taken back to before a spike of the loss.

Files and formats of checkpoints are in `nanotrain/checkpoint`.
"""
