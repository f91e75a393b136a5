"""The plan of a run for any rank, its memory and its traffic, without a device.

    plan.py         Plan: groups, stages, parameters and buffers of one rank
    memory_plan.py  bytes of a rank at the peak of a step, and settings that fit
    saved_bytes.py  activations and temporaries of a stage
    traffic.py      bytes that a rank sends per step
    gathers.py      all-gathers of parameter buckets per step
    graph_memory.py memory of CUDA graphs
    compile.py      whether blocks are compiled, and where graphs end

All of them are pure functions of the configuration. Building from a plan is in train/build.py.
"""
