"""Start a run from a checkpoint.

    restore.py    load it into a built model, or an older one if it is damaged
    from_memory.py  choose a checkpoint in the memory of the hosts
    rollback.py   go back after a spike of the loss and skip the data since then

Files and formats of checkpoints are in `checkpoint/`.
"""
