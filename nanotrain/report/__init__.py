"""Reports of runs, from their folders.

    history.py          a run folder as data
    page.py             `write_report`: one HTML file; `serve.py` follows running runs
    figures.py, tables.py, layout.py   its charts, tables and picture of ranks
    terminal.py         lists and comparisons in the terminal
    trace.py, timeline.py              the profiled step of all ranks

It needs no torch, process group or model; what a run writes is decided in `train/hooks`.
"""
