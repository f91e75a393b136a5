"""Load a model from a checkpoint, generate text, compute log-likelihoods, export to Hugging Face.

    checkpoint.py   `load_checkpoint`: the model of a checkpoint or of a Hugging Face folder
    generate.py     one prompt or several at once; `cache.py` keeps earlier tokens
    sampling.py     how the next token is chosen; `generation_config.py` reads a folder's settings
    score.py        log-likelihoods of given tokens
    lm_eval.py      the model class of EleutherAI's lm-eval

It runs on one process without a training run; evaluation in any layout is in `train/`.
"""
