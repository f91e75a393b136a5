"""Attention of this rank's queries to keys and values: one table of backends, the kernels behind
it, and their plans.

    backends.py   BACKENDS: what each kernel can compute; the choice for a layer
    call.py       the protocols, and attention calls, planned once per microbatch for all layers
    sdpa.py       torch's SDPA, and the core attention of one rank
    varlen.py     torch's varlen attention: packed documents and windows
    flex.py       FlexAttention: documents, windows, sinks, soft-capped scores
    tiles.py      documents and windows as tiles, computed and merged here
    chunks.py     attention to one chunk of keys with its log-sum-exp; softcap, sink and dropout of scores
    delta_rule.py linear attention: the gated delta rule in chunks

Attention over sequences that are sharded over ranks is in parallel/cp.
"""
