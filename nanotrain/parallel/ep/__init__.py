"""Expert parallelism: the experts of an MoE layer and the dispatch of tokens to other ranks.

    dispatchers.py        the choice of a token dispatcher
    token_dispatcher.py   local, all-to-all, and all-to-all of fixed sizes
    hierarchical.py       a token is sent to each node once
    deep_ep.py            DeepEP's kernels, where they are installed
    splits.py             split sizes and reorderings of a dispatch
    experts.py            the local experts, with stacked weights

Which experts a token uses is decided in `model/router.py`.
"""
