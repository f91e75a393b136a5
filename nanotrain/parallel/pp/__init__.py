"""Pipeline parallelism: schedules as data, their simulation and drawing, and the executor that runs
one on a rank.

Not the layers of a stage: the executor runs any module on any microbatch object.
"""
