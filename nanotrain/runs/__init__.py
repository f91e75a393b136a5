"""The run folder: the paths of everything that a run writes.

    folder.py         `RunFolder`
    files.py          files that are complete or absent, and never written through links
    lock.py           one job per folder
    metrics_file.py   metrics.jsonl

Checkpoints are written by `checkpoint/`, reports by `report/`.
"""
