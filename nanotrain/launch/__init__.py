"""Start the ranks of a run on this machine, as torchrun does (`start_ranks.py`).

It holds no training code: each rank runs the program that it is given.
"""
