"""The process and its host: start and end, standard output, cores and memory.

It holds nothing of a training: no configuration, no ranks beyond the launcher that this process must not outlive.
"""
