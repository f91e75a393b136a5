"""Data parallelism: parameters and gradients of a module in flat buffers.

    options.py         sharding strategies as traits, and the options of a wrapper
    layout.py          which elements of a buffer hold each parameter, and which rank updates them
    stores.py          the memory of a bucket, chosen from the strategy
    bucket.py          a bucket and its reductions
    units.py           all-gather of parameters unit by unit (ZeRO-3)
    fp8_weights.py     weights that are gathered in fp8
    param_buffer.py    `ParamBuffer`: the wrapper of frozen parameters, the base of the other
    data_parallel.py   `DataParallel`: the wrapper of trained parameters

Update rules and optimizer state are in `optim/`; groups of ranks are planned in `topology/`.
"""
