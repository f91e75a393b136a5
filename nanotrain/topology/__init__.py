"""Ranks, their grids and their groups, as pure plans.

    grid.py       grids of ranks with named axes
    groups.py     names and specs of groups
    topology.py   `Topology`: every group of a job
    picture.py    the output of `nanotrain topology`

No torch, no process group and no device: `comm/` creates the live groups.
"""
