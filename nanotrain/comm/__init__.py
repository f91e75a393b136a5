"""Live groups and collectives: the only package that calls torch.distributed.

    device.py, driver.py        the device of a rank, copies, streams; why torch sees no GPU
    meeting.py                  the ranks meet at MASTER_ADDR:MASTER_PORT
    process_groups.py           creates torch's process groups
    group.py                    `Group`: a group spec with its process group; traffic counts
    parallel_context.py         `ParallelContext`: this rank's device and groups
    work.py                     `Work`: the handle of an asynchronous operation
    collectives.py, all_to_all.py, send_recv.py   the operations; `gloo.py` has two for gloo
    autograd.py                 differentiable collectives
    turns.py                    two computations that hide each other's transfers
    stop_point.py               the microbatch before which all ranks stop
    heartbeat.py, flight_recorder.py              what a rank is doing, for the watchdog
    recorder.py, recorded_world.py                a world without other ranks that records calls

Which ranks form a group is planned in `topology/`; what is sent and when is decided in `parallel/`.
"""
