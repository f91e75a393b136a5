"""Training-time reading: token files to batches.

Holds datasets, blending, sampling, the batch loader and tokenizers; it does not prepare corpora
(see prepare/).

    token_format -> indexed -> gpt, packing -> blend -> build (DatasetSplits)
    build, sampler -> loader (microbatches of a rank)
    order, find (documents of a run)   mix (another blend)   tasks   tokenizer   remote
"""
