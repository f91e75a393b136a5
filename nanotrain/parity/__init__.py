"""`nanotrain parity`: compare the training of a layout with that of one rank, on a shrunk model.

It trains through `train/` and holds no training code of its own.
"""
