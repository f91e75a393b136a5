"""Expert parallelism: the experts of an MoE layer, and the dispatch of tokens to experts on other
ranks.

No router: which experts a token uses is decided in `model/`.
"""
