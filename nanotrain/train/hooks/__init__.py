"""Callbacks of the training loop: evaluation, logging, tracking, checkpoints, profiles and samples.

They read a `Run` and a `StepReport`; the training step itself is in `train/step.py`.
"""
