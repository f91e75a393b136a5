"""The watchdog of a run: heartbeats in shared memory, the detection of hung and lost ranks, and their report."""
