"""Callbacks of the training loop, one file each.

    hook.py             `Hook`: the moments at which they are called
    log.py, track.py    console and metrics.jsonl; experiment trackers (`train/trackers`)
    goodput.py          time of steps as a share of all time
    stragglers.py       ranks that stay slower than the others
    notify.py           messages to a webhook
    checkpoint.py       saves; `object_storage.py` uploads what they leave
    memory_checkpoint.py    saves in the memory of the hosts; `save_content.py`: what both write
    data_order.py       the record of the data order, and changes of the blend
    faults.py           values that are not finite, replicas that differ
    replay.py           a microbatch that another replica computes again
    timers.py, profile.py   times of phases; traces and memory snapshots
    end_of_run.py       a generated text and the report

They read a `Run` and a `StepReport`; the training step itself is in `train/step.py`.
"""
