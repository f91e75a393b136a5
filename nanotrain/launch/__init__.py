"""Start the ranks of a run on this machine.

It holds no training code: each rank runs the program that it is given.
"""
