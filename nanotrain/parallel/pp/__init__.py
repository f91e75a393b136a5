"""Pipeline parallelism: schedules as data, and the executor that runs one on a rank.

    actions.py                     `Schedule`: the actions of every rank, in order
    schedules.py, v_schedules.py   the schedules by name
    simulate.py                    whether a schedule finishes, its duration and memory
    transfers.py                   the actions and messages of one rank
    executor.py                    `run_schedule`: a step of this rank
    draw.py                        schedules as text and as a picture

It does not know layers: the executor runs any module on any microbatch object.
"""
