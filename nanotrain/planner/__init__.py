"""The planner: bytes and time of a run on many GPUs, and its best layout, without a device.

    scenario.py     one configuration on one machine, run by one engine
    engine.py       training programs; data/engines.yaml has their constants and sources
    hardware.py     GPUs and links; calibrate.py fits them to finished runs
    prediction.py   memory.py and step_time.py of a scenario
    step_time.py    the schedule on a clock; stage_time.py has the times of its actions
    kernels.py      times of single operators; collectives.py of collectives
    search.py       the fastest layouts that fit
    run_calendar.py failures, restarts and saves of a whole run; calendar_screen.py prints it
    screen.py       the output of `nanotrain plan`; explain.py has the formulas
    rows/           predictions for tables of measurements

Exact bytes of parameters and activations of nanotrain's own ranks are in plan/.
"""
