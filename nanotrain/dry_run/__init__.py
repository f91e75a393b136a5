"""The dry run: the real step of ranks that stand for all, on meta tensors and with process groups
that record.

Not here: the recorder of buffers and calls and its process groups (comm/recorder.py), and the plans
that it is compared with (plan/).
"""
