"""What a run will hold, send and need on any rank, before a device is touched: pure functions of the configuration.

Building from a plan is in train/build.py and train/stages.py; choosing among plans would belong to a planner above.
"""
