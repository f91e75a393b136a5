"""Experiment trackers: a file and a row of `TRACKERS` (`table.py`) each.

    tracker.py   `Tracker`: what a hook calls
    others       TensorBoard, Weights & Biases, Prometheus, MLflow

The hook that feeds them, with flat metrics of every step, is `hooks/track.py`.
"""
