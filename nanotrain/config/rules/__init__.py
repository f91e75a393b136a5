"""The rules that span several fields; their tables are `contradictions.yaml` and `unused.yaml` in
config/tables/.

Bounds of a single field are declared with the field, rules of pipeline schedules stand with the
schedules.
"""
