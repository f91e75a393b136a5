"""A training run.

    main.py                from a command line or a configuration to the end of training
    checks.py, inputs.py   what can be wrong before a run; its corpora, tokenizer and checkpoint
    auto_layout.py         the layout of --auto-layout
    open_run.py, build.py  build the run on this rank; `run.py` has its parts
    resume/                load a checkpoint, go back after a spike
    fit.py                 the loop: next batch, step, report, hooks
    batches.py, step.py    a global batch, and one step over it
    parts/                 what features add to a step
    step_report.py, hooks/ the numbers of a step, and what is done with them
    evaluate.py, tasks.py  validation and tasks in the layout of the run

It holds no model, storage or communication code: `build.py` assembles those of other packages.
"""
