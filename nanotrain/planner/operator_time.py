"""`OperatorTimes`: times of the operators of a scenario, one function per class of operators.

An operator whose class has no function is an error, so nothing is planned at the peak of the
device. Products are in rank_clock.py, the dispatch to experts is in dispatch_time.py.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from math import ceil
from typing import Any, NamedTuple

from nanotrain.attention.backends import AttentionNeed
from nanotrain.attention.scan_kernels import CONVOLUTION, chosen_kernel, installed_packages
from nanotrain.planner.attention_kernel import attention_flops_per_s
from nanotrain.planner.dispatch_time import dispatch_part, hide_behind_shared, router_part
from nanotrain.planner.kernels import (
    LAUNCH_S,
    AttentionShape,
    Work,
    attention_s,
    attention_work,
    matmul_s,
    memory_s,
    roofline_s,
)
from nanotrain.planner.parts import Part, Parts
from nanotrain.planner.product_time import product_parts
from nanotrain.planner.rank_clock import RankClock
from nanotrain.planner.sparse_time import (
    compressed_part,
    gathered_blocks_part,
    gathered_part,
    indexer_part,
    sparse_part,
)
from nanotrain.spec.operators import (
    Activation,
    Attention,
    CompressedAttention,
    Convolution,
    Dispatch,
    ExpertProduct,
    Gate,
    GatheredAttention,
    GatheredBlocks,
    Indexer,
    Lookup,
    Loss,
    Norm,
    Operator,
    Product,
    Residual,
    Rotary,
    Router,
    Scan,
    ScanCost,
    ScanPasses,
    SparseAttention,
)

# share of the peak with rows of no multiple of 16 bytes: heads of 108 against 216 (bigscience)
UNALIGNED_SHARE = 0.026
# time of the backward of torch's attention in bf16 on a CPU, relative to fp32 (measured)
CPU_LOW_BACKWARD = 1.45
# per attention score that is written out, forward and backward: products, mask, softmax, dropout
SCORE_FORWARD_BYTES = 13
SCORE_BACKWARD_BYTES = 22
# the host takes about 6 us per kernel, and 50 us per operator (engines.yaml)
KERNELS_PER_OPERATOR = 8
# kernels of scans: assumed, none was measured
SCAN_SHARE = 0.3  # of the peak, in products of 64 rows
SCAN_STEP_S = 2e-6  # from chunk to chunk: four products, each of which waits for another
SCAN_PROGRAMS = 132  # programs that walk at once: one per multiprocessor of an H100
# kernels of a fused scan, such as those of fla and mamba_ssm
FUSED_SCAN_LAUNCHES = (10, 20)


class Seconds(NamedTuple):
    """Times of a pass."""

    forward: float
    backward: float


class OperatorTimes(RankClock):
    """The parts that operators take on a rank of a scenario."""

    def parts(self, operators: Iterable[Operator]) -> Parts:
        """The parts of operators, in their order."""
        parts: Parts = []
        shared: Parts = []  # parts of the shared expert, which overlaps the dispatch
        has_dispatched = False
        for operator in operators:
            timed = TIMES[type(operator)](self, operator)
            if isinstance(operator, Dispatch) and not has_dispatched:
                timed = [hide_behind_shared(self, timed[0], shared=shared)]
                has_dispatched = True
            if operator.name.startswith("shared."):
                shared += timed
            if operator.over_cp and self.sizes.cp > 1:
                timed = [self._over_cp(operator, part) for part in timed]
            modules = (operator.module, *operator.recomputed_by)
            parts += [replace(part, recomputed_by=modules) for part in timed]
        return parts

    def _over_cp(self, operator: Operator, part: Part) -> Part:
        """A part with the communication of context parallelism."""
        share = self.sizes.cp / (self.sizes.cp - 1)  # with what a rank sends to itself
        for sent in operator.over_cp:
            operation = "all_gather" if sent.operation == "p2p" else sent.operation
            before = self.collective("cp", operation, num_bytes=share * sent.forward)
            last = self.collective("cp", operation, num_bytes=share * sent.backward)
            part = replace(part, group="cp", before=part.before + before, last=part.last + last)
        is_ring = [sent.operation for sent in operator.over_cp] == ["p2p"]
        if not isinstance(operator, Attention) or not is_ring:
            return part
        # the keys that are there are attended to while others arrive
        launches = (self.sizes.cp, 3 * self.sizes.cp, 0)
        return replace(part, hides="tiles", pieces=self.sizes.cp, launches=launches)

    def norm(self, operator: Norm) -> Parts:
        """A norm reads and writes its elements; the backward reads the input too."""
        num_bytes = operator.numel * self.sizes.itemsize
        launches = (operator.launches, operator.backward_launches)
        forward = num_bytes if operator.is_cast else 2 * num_bytes
        return [self.memory(operator.name, forward, backward=3 * num_bytes, launches=launches)]

    def rotary(self, operator: Rotary) -> Parts:
        """Rotary positions: two passes over the tensor if fused, else `operator.passes`."""
        passes = 2 if self.engine.operators.fused else operator.passes
        num_bytes = passes * operator.numel * self.sizes.itemsize
        launches = (passes, passes)
        return [self.memory(operator.name, num_bytes, backward=num_bytes, launches=launches)]

    def residual(self, operator: Residual) -> Parts:
        """The residual addition: 3 passes over the tensor, or 1 if fused with the norm."""
        passes = 1 if self.engine.operators.fused else 3
        if self.config.model.hidden_dropout > 0:
            passes += 1
        num_bytes = passes * operator.numel * self.sizes.itemsize
        return [self.memory(operator.name, num_bytes, backward=num_bytes)]

    def gate(self, operator: Gate) -> Parts:
        """The activation of a gate and its product, read and written once where they are fused."""
        forward, backward = (3, 5) if self.engine.operators.fused else (5, 8)
        num_bytes = operator.numel * self.sizes.itemsize
        launches = (1, 1) if self.engine.operators.fused else (2, 3)
        name = operator.module or operator.name
        return [
            self.memory(name, forward * num_bytes, backward=backward * num_bytes, launches=launches)
        ]

    def activation(self, operator: Activation) -> Parts:
        """The activation function, by the bytes that it reads and writes per inner channel."""
        is_fused = self.engine.operators.fused
        if operator.is_gated:
            forward, backward = (3, 5) if is_fused else (5, 11)
            launches = (1, 1) if is_fused else (2, 4)
        else:
            forward, backward = (2, 3) if is_fused else (4, 5)
            launches = (1, 1) if is_fused else (2, 2)
        if operator.is_cast:
            forward = 1  # the cast reads the gate in place of the product, and up
            launches = (0, launches[1])
        num_bytes = operator.numel * self.sizes.itemsize
        name = operator.module
        return [
            self.memory(name, forward * num_bytes, backward=backward * num_bytes, launches=launches)
        ]

    def convolution(self, operator: Convolution) -> Parts:
        """Short convolutions: the halo, the convolution and its activation."""
        num_bytes = operator.rows * operator.channels * self.sizes.itemsize
        count = len(operator.weights)
        forward, backward = (6, 10)
        launches = (3 * count, 5 * count)
        if self.engine.name == "nanotrain" and self._scan_row(CONVOLUTION) == "causal_conv1d":
            forward, backward = (4, 6)  # the window, and one kernel
            launches = (2 * count, 3 * count)
        return [
            self.memory(
                operator.name,
                forward * num_bytes,
                backward=backward * num_bytes,
                launches=launches,
            )
        ]

    def scan(self, operator: Scan) -> Parts:
        """A scan by the row of attention/scan_kernels.py that the machine would take."""
        if self.engine.name != "nanotrain":
            return [self._fused_scan(operator)]
        row = self._scan_row(operator.rule)
        if row != "torch":
            return [self._kernel_scan(operator, operator.kernels[row])]
        forward = self._torch_scan_s(operator.forward)
        backward = self._torch_scan_s(operator.backward)
        launches = (
            ceil(operator.forward.launches / KERNELS_PER_OPERATOR),
            ceil(operator.backward.launches / KERNELS_PER_OPERATOR),
            0,
        )
        flops = float(operator.forward.flops)
        return [Part(operator.name, forward, backward, launches=launches, flops=flops)]

    def _scan_row(self, rule: str) -> str:
        """The row of a scan or a convolution on this GPU."""
        packages = self.gpu.kernel_packages
        if packages is None:
            packages = installed_packages()
        has_low_bits = self.sizes.itemsize == 2
        return chosen_kernel(
            rule,
            installed=packages,
            is_low=has_low_bits and not self.gpu.is_cpu,
            has_triton=self.gpu.has_scan_kernels,
            has_rate=self.sizes.cp == 1,
        )

    def _kernel_scan(self, operator: Scan, passes: ScanPasses) -> Part:
        """The kernels of a row, one after the other."""
        forward = sum(map(self._scan_kernel_s, passes.forward))
        backward = sum(map(self._scan_kernel_s, passes.backward))
        flops = sum(cost.flops for cost in passes.forward)
        forward_launches = sum(cost.launches for cost in passes.forward)
        backward_launches = sum(cost.launches for cost in passes.backward)
        launches = (forward_launches, backward_launches, 0)
        return Part(operator.name, forward, backward, launches=launches, flops=float(flops))

    def _scan_kernel_s(self, cost: ScanCost) -> float:
        """Seconds of a kernel: its bytes or products, or the chunks that it walks along."""
        flops_per_s = SCAN_SHARE * self.gpu.peak(self.dtype)
        work = Work(cost.flops, cost.num_bytes)
        rounds = ceil(cost.programs / SCAN_PROGRAMS)
        walk_s = cost.steps * rounds * SCAN_STEP_S
        seconds = roofline_s(self.gpu, work, flops_per_s=flops_per_s)
        further_s = (cost.launches - 1) * LAUNCH_S
        return further_s + max(seconds, walk_s)

    def _torch_scan_s(self, cost: ScanCost) -> float:
        """Seconds of eager operators in fp32: their launches, and their bytes or FLOPs."""
        flops_per_s = self.gpu.peak("fp32") * self.gpu.reachable["fp32"]
        work = Work(cost.flops, cost.num_bytes)
        return (cost.launches - 1) * LAUNCH_S + roofline_s(self.gpu, work, flops_per_s=flops_per_s)

    def _fused_scan(self, operator: Scan) -> Part:
        """Kernels that multiply in the dtype of the activations and keep chunks on the chip."""
        flops_per_s = self.gpu.peak(self.dtype) * self.gpu.reachable[self.dtype]
        forward_work = Work(operator.forward.flops, operator.fused_bytes)
        backward_work = Work(operator.backward.flops, 3 * operator.fused_bytes)
        return Part(
            operator.name,
            roofline_s(self.gpu, forward_work, flops_per_s=flops_per_s),
            roofline_s(self.gpu, backward_work, flops_per_s=flops_per_s),
            launches=(*FUSED_SCAN_LAUNCHES, 0),
            flops=float(operator.forward.flops),
        )

    def attention(self, operator: Attention) -> Parts:
        """Scaled dot-product attention."""
        cp = self.sizes.cp
        ranks = self.sizes.all_to_all_ranks  # they split heads instead of the sequence
        heads = max(1, operator.heads // ranks)
        kv_heads = max(1, operator.kv_heads // ranks)
        share = ranks / cp  # every rank has its part of the pairs
        forward = backward = flops = 0.0
        for count, length in operator.chunks:
            call = AttentionShape(
                batch=operator.batch * count,
                heads=heads,
                kv_heads=kv_heads,
                length=length,
                head_dim=operator.head_dim,
                value_head_dim=operator.value_head_dim,
                window=operator.window,
            )
            seconds = self._attention_s(call)
            forward += share * seconds.forward
            backward += share * seconds.backward
            flops += share * attention_work(call).flops
        return [Part(operator.name, forward, backward, launches=(1, 3, 0), flops=flops)]

    def _attention_s(self, call: AttentionShape) -> Seconds:
        """Seconds of one call."""
        if self.config.train.attention_backend in ("unfused", "local"):
            return self._written_attention_s(call)
        dtype = self.dtype if self.dtype in ("bf16", "fp16") else "bf16"
        factor = self.engine.operators.attention_factor
        forward = factor * attention_s(self.gpu, call, dtype=dtype)
        backward = factor * attention_s(self.gpu, call, dtype=dtype, backward=True)
        flops_per_s = self._kernel_flops_per_s(has_window=call.window is not None)
        if flops_per_s is not None:
            slow = partial(attention_s, self.gpu, call, dtype=dtype, flops_per_s=flops_per_s)
            forward = max(forward, slow())
            backward = max(backward, slow(backward=True))
        if self.gpu.is_cpu and self.sizes.itemsize == 2:
            backward *= CPU_LOW_BACKWARD
        return Seconds(forward, backward)

    def _kernel_flops_per_s(self, *, has_window: bool) -> float | None:
        """The FLOP/s of the kernel that nanotrain takes; None for the measured one."""
        flops_per_s: float | None = None
        if self.engine.name == "nanotrain":
            need = AttentionNeed.of(self.config, has_window=has_window)
            flag = self.config.train.attention_backend
            flops_per_s = attention_flops_per_s(self.gpu, need, flag=flag)
        return flops_per_s

    def _written_attention_s(self, call: AttentionShape) -> Seconds:
        """Attention that writes its scores out."""
        batch = call.batch * call.heads
        scores = batch * call.length**2
        key_product = (call.length, call.length, call.head_dim)
        value_product = (call.length, call.head_dim, call.length)
        products_s = matmul_s(self.gpu, key_product, dtype=self.dtype, num=batch)
        products_s += matmul_s(self.gpu, value_product, dtype=self.dtype, num=batch)
        if call.head_dim * self.sizes.itemsize % 16:
            slow_peak = UNALIGNED_SHARE * self.gpu.peak(self.dtype)
            products_s = max(products_s, 4.0 * scores * call.head_dim / slow_peak)
        forward = memory_s(self.gpu, SCORE_FORWARD_BYTES * scores)
        backward = memory_s(self.gpu, SCORE_BACKWARD_BYTES * scores)
        return Seconds(products_s + forward, 2 * products_s + backward)

    def lookup(self, operator: Lookup) -> Parts:
        """Look-up of the tokens, and the sum over the vocabularies of tp ranks."""
        sizes = self.sizes
        num_bytes = operator.rows * sizes.width
        backward = 3 * num_bytes
        if self.engine.operators.accumulation == "separate":
            backward += 12 * sizes.columns * sizes.shape.hidden_size
        part = self.memory(operator.name, 2 * num_bytes, backward=backward)
        if sizes.tp == 1:
            return [part]
        if not sizes.sequence_parallel:
            reduce_s = self.collective("tp", "all_reduce", num_bytes=num_bytes)
            return [replace(part, group="tp", after=reduce_s)]
        scatter_s = self.collective("tp", "reduce_scatter", num_bytes=num_bytes)
        gather_s = self.collective("tp", "all_gather", num_bytes=num_bytes)
        return [replace(part, group="tp", after=scatter_s, first=gather_s)]

    def loss(self, operator: Loss) -> Parts:
        """The softmax over the vocabulary, by the bytes that it reads and writes per logit."""
        logits = operator.rows * operator.columns
        forward = self.engine.operators.loss_forward_bytes * logits
        backward = self.engine.operators.loss_backward_bytes * logits
        return [self.memory(operator.name, forward, backward=backward, launches=(8, 4))]


TIMES: dict[type[Operator], Callable[[OperatorTimes, Any], Parts]] = {
    Product: product_parts,
    ExpertProduct: product_parts,
    Norm: OperatorTimes.norm,
    Rotary: OperatorTimes.rotary,
    Residual: OperatorTimes.residual,
    Gate: OperatorTimes.gate,
    Activation: OperatorTimes.activation,
    Attention: OperatorTimes.attention,
    SparseAttention: lambda times, operator: [sparse_part(times, operator)],
    CompressedAttention: lambda times, operator: [compressed_part(times, operator)],
    GatheredAttention: lambda times, operator: [gathered_part(times, operator)],
    GatheredBlocks: lambda times, operator: [gathered_blocks_part(times, operator)],
    Indexer: lambda times, operator: [indexer_part(times, operator)],
    Convolution: OperatorTimes.convolution,
    Scan: OperatorTimes.scan,
    Router: lambda times, operator: [router_part(times, operator)],
    Dispatch: lambda times, operator: [dispatch_part(times, operator)],
    Lookup: OperatorTimes.lookup,
    Loss: OperatorTimes.loss,
}
