"""Ranks, their grids and their groups, as pure plans.

No torch, no process group and no device: `comm/` creates the live groups.
"""
