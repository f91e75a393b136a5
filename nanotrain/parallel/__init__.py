"""The parallel axes, one package each: `tp`, `cp`, `ep`, `pp` and `dp`, which never import each
other.

They hold layers, schedules and storage, no groups and no models: groups are made in `comm/`, models
in `model/`.
"""
