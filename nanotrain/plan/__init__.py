"""The plan of a run for any rank, and its memory and traffic: pure functions of the configuration,
without a device.

Not here: building from a plan (train/build.py).
"""
