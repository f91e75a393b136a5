"""Attention of this rank's queries to keys and values: backends, their kernels and plans.

    backends.py      BACKENDS: limits of each kernel; the choice for a layer
    call.py          the protocols, and attention calls, planned once per microbatch for all layers
    sdpa.py          torch's SDPA, and the core attention of one rank
    varlen.py        torch's varlen attention: packed documents and windows
    flex.py          FlexAttention: documents, windows, sinks, soft-capped scores
    tiles.py         documents and windows as tiles, computed and merged here
    chunks.py        attention to one chunk of keys; softcap, sink and dropout of scores
    sparse.py        attention to the keys that a lightning indexer selects
    blocks.py        blocks of keys that an index selects; block_sparse.py, block_gathered.py,
                     attention to them
    compressed.py    attention to a window and to compressed keys
    delta_rule.py    linear attention: the gated delta rule in chunks
    ssd.py           the scan of Mamba-2 in chunks
    scan_kernels.py  SCAN_KERNELS: which kernels compute a scan
    chunk_scan.py    scans by this project's Triton kernels; package_scans.py, by other packages
    convolution.py   short causal convolutions

Attention over sequences that are sharded over ranks is in parallel/cp.
"""
