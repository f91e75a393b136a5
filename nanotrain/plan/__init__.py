"""The plan of a run for any rank, its memory and its traffic, without a device.

    model_plan.py   ModelPlan: groups, stages, parameters and buffers of one rank
    plan.py         Plan: a ModelPlan with its samples and its schedules
    buffers.py      flat buffers of a stage, and the hidden matrices in them
    memory_plan.py  bytes of a rank at the peak of a step, those of CUDA graphs too
    fitting.py      settings with which a run that is too large would fit
    saved_bytes.py  activations and temporaries of a stage
    traffic.py      bytes that a rank sends per step
    gathers.py      all-gathers of parameter buckets per step
    compile.py      whether blocks are compiled, and where graphs end

All of them are pure functions of the configuration. Building from a plan is in train/build.py.
"""
