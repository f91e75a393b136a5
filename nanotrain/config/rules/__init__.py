"""The rules that span several fields: values that contradict each other, or have no effect.

check.py                    runs them; every broken rule is in one error
groups.py                   all rules in their order, by when they are checked
settings.py                 what a rule reads: the sections, and sizes that follow from them
model.py, experts.py        the model section
layout.py, stages.py, memory.py    the parallel layout, recomputation and offloading for a model
run.py, sharding.py         a run: schedules, data, checkpoints; dtypes and sharding
start.py                    before a run starts on a device
unused.py, unused_*.py      fields without effect

A rule is an `if` and the `ConfigError` that it yields. Bounds of a single field are declared with
the field, rules of pipeline schedules are in parallel/pp.
"""
