"""Checkpoints of Megatron-LM, out and in.

export_run.py             a `torch_dist` checkpoint from one of nanotrain
export.py, limits.py      its weights; the models that have none
export_state.py           main parameters, moments and counters in it
export_arguments.py       the arguments of our configuration
names.yaml                the modules of Megatron-LM, and the modules of nanotrain that they join
folder.py                 the files of a checkpoint; its tensors and pickles are read by interop/dcp
arguments.py              its arguments as a configuration
legacy.py                 files of model-parallel ranks as the tensors of a folder, with
legacy_optimizer.py       the numbers of an optimizer's parameters, and
legacy_buffers.py         the buffers of the distributed one
placement.py              the place of each of our tensors in its tensors
optimizer_state.py        main parameters, moments and counters
main_params.py            the check that main parameters are those of the weights
buckets.py, flattened.py  forms of the distributed optimizer
import_run.py             a checkpoint of nanotrain from all of them

It trains nothing and imports nothing of Megatron-LM: it reads and writes files.
"""
