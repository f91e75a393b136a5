"""The watchdog of a run.

    processes.py   the ranks of this machine and their heartbeats in shared memory
    watchdog.py    a thread per rank that ends a run without progress
    sniff.py       a test of the machines before a run
    report.py      hang-report.txt: which rank is behind, and where

What a rank records is in `comm/heartbeat.py`; ranks are started again by `launch/`.
"""
