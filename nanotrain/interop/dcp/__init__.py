"""Checkpoints of torch.distributed.checkpoint.

export.py                  a checkpoint of ours for `dcp.load`
pickles.py                 pickles of other programs, read without running anything
tensors.py                 boxes of the tensors of a folder
stored.py                  its parts: weights, states of the optimizer, other values
names.py, torchtitan.yaml  the tensors there of every parameter of ours
model.py, guess.py         the model, from config.json, settings and shapes
optimizer.py               settings of AdamW, and counters
import_run.py              a checkpoint of ours from all of them
own.py                     the way back of export.py

Megatron-LM's `torch_dist` format is such a folder too.
"""
