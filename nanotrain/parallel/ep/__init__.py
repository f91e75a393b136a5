"""Expert parallelism: the experts of an MoE layer, and the dispatch of tokens to other ranks.

    experts.py            the local experts, as grouped matrix products
    token_dispatcher.py   tokens to the ranks of their experts and back
    splits.py             the split sizes of these all-to-alls

No router: which experts a token uses is decided in `model/`.
"""
