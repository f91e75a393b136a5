"""Proof that a layout sums every gradient exactly once, without numbers.

A rank trains a step on the meta device, and every tensor carries a type: along which axes of ranks
its values are equal, vary, or are a partial sum.

    axes        the axes of a topology as factors of the rank, shared by dense and expert grids
    types       types of tensors, by ranges of their storage
    rules       the types of the results of torch's operators and of collectives
    messages    the types of messages between pipeline stages
    seams       the places where a type is declared or must hold: gradients, norms
    check       the ranks of a layout, and the report
"""
