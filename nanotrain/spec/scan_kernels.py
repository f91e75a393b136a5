"""What the kernels of a scan cost, from what each reads and writes.

    KernelTerms     tensors that one kernel reads and writes, and its products
    KERNELS         kernels of forward and backward by rule and by row of attention/scan_kernels.py
    kernel_costs    their FLOPs, bytes, launches and steps

Counted from the arguments of the kernels: each tensor once per kernel, so blocks of columns that
read the same keys read them from the cache. Kernels of other packages are counted from their source
(fla-core 0.6.0, mamba_ssm e9594ce). tests/spec/test_scan_kernels.py counts those of this project.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from nanotrain.spec.layer_sizes import FP32
from nanotrain.spec.operators import ScanCost, ScanPasses
from nanotrain.spec.scan_cost import ScanSizes

VALUE_BLOCK = 64  # columns of a state that a program walks along
MAMBA_CHUNK = 256  # tokens of a chunk of mamba_ssm


@dataclass(frozen=True, kw_only=True)
class KernelTerms:
    """Tensors that a kernel reads and writes, and its FLOPs per token and head."""

    vectors: int = 0  # queries or keys, per group
    channels: int = 0  # channels of keys, per head of values
    values: int = 0
    wide_values: int = 0  # in fp32
    pairs: int = 0  # tokens of a chunk, per head of values
    group_pairs: int = 0  # tokens of a chunk, per group
    states: int = 0  # states of the chunks
    decays: int = 0  # in fp32
    state_flops: int = 0  # times K V
    value_flops: int = 0  # times C V
    key_flops: int = 0  # times C K
    chunk_flops: int = 0  # times C C
    walks: bool = False  # from chunk to chunk
    launches: int = 1


Terms = tuple[KernelTerms, ...]
CUMSUM = KernelTerms(decays=2)
CUMSUM_BACK = KernelTerms(decays=6, launches=3)
SUM_HEADS = KernelTerms(vectors=2, channels=2, launches=2)
PAIRS = KernelTerms(vectors=2, decays=1, pairs=1, key_flops=2)
SSD_KEEP = KernelTerms(vectors=1, values=1, decays=2, states=1, state_flops=2, walks=True)
SSD_WALK = KernelTerms(
    vectors=2, values=1, wide_values=1, pairs=1, decays=2, state_flops=4, value_flops=2, walks=True
)
SSD_BACK = replace(SSD_WALK, states=1, decays=1)
SSD_CHUNK = KernelTerms(
    vectors=2, channels=2, values=3, wide_values=1, states=2, decays=4,
    state_flops=4, value_flops=2, key_flops=4,
)  # fmt: skip
DELTA_PREPARE = KernelTerms(
    vectors=2, channels=1, values=2, pairs=1, decays=1,
    value_flops=2, key_flops=6, chunk_flops=20,
)  # fmt: skip
DELTA_WALK = KernelTerms(
    vectors=2, channels=1, values=2, pairs=1, decays=1, state_flops=6, value_flops=2, walks=True
)
DELTA_KEEP = KernelTerms(
    vectors=1, channels=1, values=2, decays=1, states=1, state_flops=4, walks=True
)
DELTA_BACK = replace(DELTA_WALK, states=1)
DELTA_CHUNK = KernelTerms(
    vectors=2, channels=3, values=3, decays=2, states=2,
    state_flops=6, value_flops=2, key_flops=4,
)  # fmt: skip
DELTA_SYSTEM = KernelTerms(
    vectors=1, channels=3, values=3, decays=3, value_flops=4, key_flops=10, chunk_flops=24
)
# pairs with decays per channel: six products of halved blocks instead of one
KDA_PREPARE = replace(DELTA_PREPARE, key_flops=26)
KDA_CHUNK = replace(DELTA_CHUNK, key_flops=24)
KDA_SYSTEM = replace(DELTA_SYSTEM, key_flops=40)
FLA_NORMS = KernelTerms(vectors=4, launches=2)
FLA_NORMS_BACK = KernelTerms(vectors=6, launches=2)
FLA_SOLVE = KernelTerms(
    vectors=1, channels=1, values=2, pairs=1, decays=1, value_flops=2, key_flops=4, chunk_flops=20
)
FLA_OUT = KernelTerms(
    vectors=2, values=2, states=1, decays=1, state_flops=2, value_flops=2, key_flops=2
)
FLA_FORWARD: Terms = (FLA_NORMS, CUMSUM, FLA_SOLVE, DELTA_KEEP, FLA_OUT)
FLA_BACKWARD: Terms = (
    replace(FLA_SOLVE, chunk_flops=0),
    DELTA_KEEP,
    KernelTerms(vectors=2, values=2, decays=1, value_flops=2, key_flops=2),
    replace(DELTA_BACK, values=3, pairs=0),
    replace(DELTA_CHUNK, values=4),
    replace(DELTA_SYSTEM, pairs=1, chunk_flops=4),
    KernelTerms(channels=3),
    FLA_NORMS_BACK,
    CUMSUM,
)
KDA_PAIRS = KernelTerms(vectors=2, decays=1, pairs=2, key_flops=26, chunk_flops=20)
FLA_KDA_FORWARD: Terms = (FLA_NORMS, CUMSUM, KDA_PAIRS, FLA_SOLVE, DELTA_KEEP, FLA_OUT)
FLA_KDA_BACKWARD: Terms = (*FLA_BACKWARD, replace(KDA_PAIRS, channels=4, key_flops=48))
GLA_REPEAT = KernelTerms(vectors=2, channels=2, values=2, launches=3)
GLA_CAST = KernelTerms(values=1, wide_values=1)
GLA_STATES = KernelTerms(channels=1, values=1, decays=1, states=1, state_flops=2, walks=True)
GLA_OUT = KernelTerms(
    channels=2, values=2, decays=1, states=1, state_flops=2, value_flops=2, key_flops=2
)
GLA_FORWARD: Terms = (GLA_REPEAT, CUMSUM, GLA_STATES, GLA_OUT, GLA_CAST)
GLA_BACKWARD: Terms = (
    GLA_CAST,
    replace(GLA_STATES, states=2),
    replace(GLA_STATES, states=2),
    KernelTerms(
        channels=4, values=2, states=4, decays=2, state_flops=4, value_flops=2, key_flops=4
    ),
    KernelTerms(channels=2, values=3, states=2, decays=1, state_flops=2, value_flops=2),
    CUMSUM,
    replace(GLA_REPEAT, launches=4),
)
MAMBA_DECAYS = KernelTerms(decays=3)
MAMBA_STATES = KernelTerms(vectors=1, values=1, decays=1, states=2, state_flops=2)
MAMBA_PASS = KernelTerms(states=3)
MAMBA_PAIRS = KernelTerms(vectors=2, group_pairs=2)
MAMBA_FORWARD: Terms = (
    MAMBA_DECAYS,
    MAMBA_STATES,
    MAMBA_PASS,
    MAMBA_PAIRS,
    KernelTerms(
        vectors=1, values=2, states=1, group_pairs=2, decays=1, state_flops=2, value_flops=2
    ),
    GLA_CAST,
)
MAMBA_BACKWARD: Terms = (
    GLA_CAST,
    MAMBA_DECAYS,
    MAMBA_STATES,
    MAMBA_PASS,
    MAMBA_PAIRS,
    KernelTerms(vectors=1, values=1, states=2, decays=1, state_flops=2),
    KernelTerms(states=5),
    KernelTerms(
        vectors=1, values=3, states=1, group_pairs=2, decays=2, state_flops=2, value_flops=2
    ),
    KernelTerms(vectors=3, values=1, states=1, decays=1, state_flops=2),
    KernelTerms(vectors=3, values=1, states=1, decays=1, state_flops=2),
    KernelTerms(values=2, group_pairs=2, decays=1, value_flops=2),
    KernelTerms(vectors=4, group_pairs=4, launches=2),
    KernelTerms(values=2, group_pairs=2, decays=1, value_flops=2),
    KernelTerms(decays=4),
)
# forward and backward, by rule and row
KERNELS: Mapping[str, Mapping[str, tuple[Terms, Terms]]] = {
    "mamba2": {
        "triton": (
            (CUMSUM, PAIRS, SSD_WALK),
            (PAIRS, SSD_KEEP, SSD_BACK, SSD_CHUNK, SUM_HEADS, CUMSUM_BACK),
        ),
        "fla": (GLA_FORWARD, GLA_BACKWARD),
        "mamba_ssm": (MAMBA_FORWARD, MAMBA_BACKWARD),
    },
    "gated_delta_net": {
        "triton": (
            (CUMSUM, DELTA_PREPARE, DELTA_WALK),
            (
                DELTA_PREPARE,
                DELTA_KEEP,
                DELTA_BACK,
                DELTA_CHUNK,
                DELTA_SYSTEM,
                SUM_HEADS,
                CUMSUM_BACK,
            ),
        ),
        "fla": (FLA_FORWARD, FLA_BACKWARD),
    },
    "kda": {
        "triton": (
            (CUMSUM, KDA_PREPARE, DELTA_WALK),
            (KDA_PREPARE, DELTA_KEEP, DELTA_BACK, KDA_CHUNK, KDA_SYSTEM, CUMSUM_BACK),
        ),
        "fla": (FLA_KDA_FORWARD, FLA_KDA_BACKWARD),
    },
}


def kernel_costs(
    rule: str, sizes: ScanSizes, *, itemsize: int, batch: int
) -> dict[str, ScanPasses]:
    """Costs by row.

    Args:
        rule: "mamba2", "gated_delta_net" or "kda".
        sizes: heads and chunks.
        itemsize: bytes of an element of queries, keys and values.
        batch: sequences.
    """
    num_decays = sizes.key if rule == "kda" else 1
    costs: dict[str, ScanPasses] = {}
    for row, (forward, backward) in KERNELS[rule].items():
        chunked = sizes
        if row == "mamba_ssm":
            chunked = replace(sizes, chunk=MAMBA_CHUNK)
        counter = _Counter(chunked, itemsize=itemsize, batch=batch, num_decays=num_decays)
        costs[row] = ScanPasses(counter.costs(forward), counter.costs(backward))
    return costs


@dataclass(frozen=True)
class _Counter:
    """Sizes of a scan, of which kernels cost multiples."""

    sizes: ScanSizes
    itemsize: int
    batch: int
    num_decays: int  # per token and head

    def costs(self, terms: Sequence[KernelTerms]) -> tuple[ScanCost, ...]:
        """Costs of kernels, one after the other."""
        return tuple(self._cost(kernel) for kernel in terms)

    def _cost(self, kernel: KernelTerms) -> ScanCost:
        sizes = self.sizes
        blocks = -(-sizes.value // VALUE_BLOCK)
        return ScanCost(
            flops=sizes.tokens * sizes.heads * self._flops(kernel),
            num_bytes=sizes.tokens * self._num_bytes(kernel),
            launches=kernel.launches,
            steps=sizes.num_chunks if kernel.walks else 0,
            programs=self.batch * sizes.heads * blocks,
        )

    def _flops(self, kernel: KernelTerms) -> int:
        """Per token and head."""
        sizes = self.sizes
        flops = kernel.state_flops * sizes.key * sizes.value
        flops += kernel.value_flops * sizes.chunk * sizes.value
        flops += kernel.key_flops * sizes.chunk * sizes.key
        return flops + kernel.chunk_flops * sizes.chunk**2

    def _num_bytes(self, kernel: KernelTerms) -> int:
        """Per token."""
        sizes = self.sizes
        low = kernel.channels * sizes.key
        low += kernel.values * sizes.value
        low += kernel.pairs * sizes.chunk
        low += kernel.states * sizes.state
        group = kernel.vectors * sizes.key + 2 * kernel.group_pairs * sizes.chunk
        wide = kernel.wide_values * sizes.value + kernel.decays * self.num_decays
        low_bytes = (sizes.heads * low + sizes.groups * group) * self.itemsize
        return low_bytes + sizes.heads * wide * FP32
