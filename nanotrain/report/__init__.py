"""Reports of runs: an HTML page, a list, a comparison in the terminal, and the timeline of a
profiled step.

It reads run folders only and needs no torch, process group or model; what a run writes is in
`train/hooks`.
"""
