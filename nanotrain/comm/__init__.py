"""Live groups and collectives: devices, process groups, asynchronous work, traffic counts.

Which ranks form a group is planned in `topology/`; what is sent and when is decided in `parallel/`.
"""
