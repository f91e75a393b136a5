"""Expert parallelism: the experts of an MoE layer and the dispatch of tokens to other ranks.

    token_dispatcher.py   the dispatchers, by their value of --moe-token-dispatcher-type
    splits.py             split sizes and reorderings of a dispatch
    experts.py            the local experts, with stacked weights

Which experts a token uses is decided in `model/router.py`.
"""
