"""The rules that span several fields, as tables: one file per part of the configuration.

Bounds of a single field are declared with the field, rules of pipeline schedules stand with the schedules.
"""
