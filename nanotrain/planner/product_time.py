"""Times of matrix products with weights, and of the collectives of tensor parallelism.

product_parts   linear layers, and those of experts; in 8 bits with the casts of their operands
"""

from dataclasses import replace

from nanotrain.planner.kernels import BYTES, grouped_matmul_s, matmul_s, memory_s
from nanotrain.planner.parts import Part, Parts
from nanotrain.planner.rank_clock import RankClock
from nanotrain.precision.fp8 import RECIPES
from nanotrain.spec.operators import ExpertProduct, Product

# how often casts read an operand: once for both layouts; NVFP4 for amaxes and for each layout
CAST_READS = {"nvfp4": 3}
ACCUMULATED_BYTES = 10  # per weight: an operator of its own adds the gradient to an fp32 buffer


def product_parts(clock: RankClock, product: Product) -> Parts:
    """The parts of a product."""
    sizes = clock.sizes
    dtype = clock.dtype if product.name == "head" else clock.scenario.matmul_dtype
    part = _product_part(clock, product, dtype=dtype)
    if product.shard and sizes.tp > 1:
        width = product.inputs if product.shard == "column" else product.outputs
        num_bytes = product.rows * width * sizes.itemsize
        part = _with_collectives(clock, part, shard=product.shard, num_bytes=num_bytes)
    if dtype == clock.dtype:
        return [part]
    # operands into fewer bits, in both layouts
    per_element = CAST_READS.get(dtype, 1) * sizes.itemsize + 2 * BYTES[dtype]
    read = product.rows * product.inputs * per_element
    written = product.rows * product.outputs * per_element
    weights = _weight_cast_bytes(clock, product, dtype=dtype)
    return [clock.memory(part.name, read + weights, backward=written + weights), part]


def _weight_cast_bytes(clock: RankClock, product: Product, *, dtype: str) -> float:
    """Bytes of the cast of a weight for one product, where none is kept for a step: in NVFP4."""
    if dtype != "nvfp4" or clock.engine.name != "nanotrain":
        return 0.0
    numel = product.outputs * product.inputs
    if isinstance(product, ExpertProduct):
        numel *= product.num_experts
    return numel * (clock.sizes.itemsize + BYTES[dtype])


def _product_part(clock: RankClock, product: Product, *, dtype: str) -> Part:
    """The products of forward and backward."""
    gpu = clock.gpu
    accumulation = clock.engine.operators.accumulation
    is_fused = accumulation == "fused"
    shape = (product.rows, product.outputs, product.inputs)
    transposed = (product.rows, product.inputs, product.outputs)
    num_experts = 1
    if isinstance(product, ExpertProduct):
        num_experts = product.num_experts
        forward = grouped_matmul_s(gpu, shape, num_experts=num_experts, dtype=dtype)
        dgrad = grouped_matmul_s(gpu, transposed, num_experts=num_experts, dtype=dtype)
        wgrad = grouped_matmul_s(gpu, shape, num_experts=num_experts, dtype=dtype, accumulate=True)
    else:
        weight = (product.outputs, product.inputs, product.rows)
        forward = matmul_s(gpu, shape, dtype=dtype)
        dgrad = matmul_s(gpu, transposed, dtype=dtype)
        wgrad = matmul_s(gpu, weight, dtype=dtype, accumulate=is_fused)
    if accumulation == "separate":
        numel = num_experts * product.outputs * product.inputs
        wgrad += memory_s(gpu, ACCUMULATED_BYTES * numel)
    return Part(
        product.module or product.name,
        forward,
        dgrad,
        wgrad,
        launches=(1, 1, 1 if is_fused else 2),
        sizes=shape,
        flops=float(product.flops),
    )


def _is_narrow(clock: RankClock) -> bool:
    """Whether linear layers multiply fewer bits than parameters have."""
    return clock.scenario.matmul_dtype != clock.dtype


def _is_in_pieces(clock: RankClock, part: Part) -> bool:
    """Whether --tp-comm-overlap applies: not to the head, nor to products with scales per block."""
    is_wanted = clock.config.parallel.tp_comm_overlap and clock.sizes.sequence_parallel
    if not is_wanted or part.name == "head":
        return False
    fp8 = clock.config.precision.fp8
    return fp8 is None or RECIPES[fp8.recipe].block[1] is None


def _in_pieces(clock: RankClock, part: Part, *, shard: str, num_bytes: float) -> Part:
    """Products of a piece of the tokens per rank, copies of inputs, and sums of partial sums."""
    rows, outputs, inputs = part.sizes
    pieces = clock.sizes.tp
    piece_rows = max(1, rows // pieces)
    dtype = clock.scenario.matmul_dtype
    forward = pieces * matmul_s(clock.gpu, (piece_rows, outputs, inputs), dtype=dtype)
    copy_s = memory_s(clock.gpu, 2 * num_bytes / pieces)  # to the memory that others read
    if shard == "column":
        return replace(part, forward=forward + copy_s)
    sum_s = memory_s(clock.gpu, num_bytes + num_bytes / pieces)
    if _is_narrow(clock):
        return replace(part, forward=forward + sum_s)
    dgrad = pieces * matmul_s(clock.gpu, (piece_rows, inputs, outputs), dtype=dtype)
    return replace(part, forward=forward + sum_s, dgrad=dgrad + copy_s)


def _with_collectives(clock: RankClock, part: Part, *, shard: str, num_bytes: float) -> Part:
    """Add the tensor-parallel collectives of `num_bytes` to a product."""
    overlaps = _is_in_pieces(clock, part)
    hides = clock.engine.overlap.tp
    if overlaps:
        hides = "forward tiles" if _is_narrow(clock) else "tiles"
    hides = clock.scenario.tp_overlap or hides
    part = replace(part, group="tp", hides=hides, pieces=clock.sizes.tp)
    if overlaps:
        part = _in_pieces(clock, part, shard=shard, num_bytes=num_bytes)
    if not clock.sizes.sequence_parallel:
        reduce_s = clock.collective("tp", "all_reduce", num_bytes=num_bytes)
        return replace(part, last=reduce_s) if shard == "column" else replace(part, after=reduce_s)
    gather_s = clock.collective("tp", "all_gather", num_bytes=num_bytes)
    scatter_s = clock.collective("tp", "reduce_scatter", num_bytes=num_bytes)
    if shard == "column":
        before = gather_s
        if overlaps and _is_narrow(clock):  # the input is sent in fp8
            before = clock.collective(
                "tp", "all_gather", num_bytes=num_bytes / clock.sizes.itemsize
            )
        return replace(part, before=before, again=gather_s, last=scatter_s)
    return replace(part, after=scatter_s, first=gather_s)
