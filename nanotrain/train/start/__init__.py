"""What happens before the first step: ranks started, inputs opened, a run launched, its header printed.

The parts of a run are built in `train/build.py`; steps are in `train/trainer.py`.
"""
