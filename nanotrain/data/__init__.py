"""Tokens to batches.

token_format -> indexed -> gpt --+
                    synthetic -------+-> blend -> build (Datasets) -> loader (microbatches of a rank)
    permutation, split, sources ----/              sampler ---------/
    tokenizer, documents -> prepare, quickstart: text to token files
"""
