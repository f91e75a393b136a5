"""The report of a step: its numbers, spikes of the loss, and the loss on each corpus.

Where the numbers are written is in `train/hooks`.
"""
