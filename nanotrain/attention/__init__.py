"""Core attention of one rank: SDPA, varlen, FlexAttention and chunked attention, behind one signature.

It holds no communication: context parallelism (`parallel/cp/`) calls these functions on its shards.
"""
