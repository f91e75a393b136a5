"""The start of a run: start the ranks, open the inputs, build the run, print its header.

The parts of a run are built in `train/build.py`; steps are in `train/fit.py`.
"""
