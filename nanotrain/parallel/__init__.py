"""The parallel axes, one package each, which never import each other.

    tp/   linear layers, embedding and loss with sharded weights; sequence parallelism
    cp/   attention and scans over sequences that are sharded over ranks
    ep/   experts on several ranks, and the dispatch of tokens
    pp/   pipeline schedules and their executor
    dp/   flat buffers, gradient reduction, parameter all-gather (ZeRO)

They hold layers, schedules and storage. Groups are made in `comm/`, models in `model/`.
"""
