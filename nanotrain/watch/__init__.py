"""The watchdog of a run: heartbeats in shared memory, the detection of hung and lost ranks, and
their report.

What a rank records is `comm/heartbeat.py`; how ranks are started again is `launch/`.
"""
