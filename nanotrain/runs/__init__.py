"""The run folder: the paths of everything that a run writes.

    folder.py         `RunFolder`
    files.py          files that are complete or absent, and never written through links
    lock.py           one job per folder
    metrics_file.py   metrics.jsonl
    request.py        requests to a running job; relayout.py: for another layout
    failures.py       what ranks noted when an attempt failed; verdict.py judges it

Checkpoints are written by `checkpoint/`, reports by `report/`.
"""
