"""The dry run: the real step of ranks that stand for all, on meta tensors, in a recorded world.

    check.py          run the ranks of a configuration, compare them, print one screen
    rank.py           the step of one rank
    rank_classes.py   the ranks that run the same program, and the ranks that are run
    agreement.py      whether all members of a group start the same collectives
    stand_ins.py      stand-ins for GPU kernels and for values on the host
    settings.yaml     settings of every dry run

The recorder of calls and buffers is in `comm/`, the plans that it is compared with are in `plan/`.
"""
