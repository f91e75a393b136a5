"""Training-time reading: token files to batches.

Holds datasets, blending, sampling, the batch loader and tokenizers; it does not prepare corpora
(see prepare/).

token_format -> indexed -> gpt --+
                    synthetic ---+-> blend -> build (DatasetSplits) -> loader (microbatches of a rank)
    permutation, split, data_path -/            sampler ---------------/
"""
