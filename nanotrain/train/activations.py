"""`Activations`: bytes that autograd keeps of one microbatch on one rank, in closed form.

Source: Korthikanti et al. 2022, section 4; here neither attention scores nor logits are kept. A tensor that several
operations keep counts once; parameters do not count. `tests/train/test_activations.py` compares with torch.
"""

from nanotrain.parallel.tp.loss import CHUNK_ELEMENTS, MIN_CHUNK_TOKENS
from nanotrain.precision.policy import Precision
from nanotrain.train.plan import Plan

FP32, INT64 = 4, 8
ROUTER_TENSORS = 5  # fp32 [tokens, experts]: logits, scores and the probabilities of the losses


class Activations:
    """What the ranks of one plan keep of a microbatch.

    Args:
        plan: of a rank.
        device: "cpu" or "cuda", where SDPA keeps grouped key/value heads as they are.
    """

    def __init__(self, plan: Plan, device: str) -> None:
        config, self.shape, self.device = plan.config, plan.shape, device
        self.tp, self.cp, self.etp = (plan.groups[axis].size for axis in ("tp", "cp", "etp"))
        self.cp_comm_type = config.parallel.cp_comm_type if self.cp > 1 else None
        self.sequence_parallel, self.has_segments = config.parallel.sequence_parallel, config.data.reset_attention_mask
        self.batch_size, self.seq_length = config.train.micro_batch_size, config.data.seq_length // self.cp
        self.tokens = self.batch_size * self.seq_length
        self.outside = self.tokens // (self.tp if self.sequence_parallel else 1)  # of tensor-parallel layers
        self.itemsize = Precision.of(config.precision).params.itemsize
        self.width = self.shape.hidden_size * self.itemsize

    def block(self, layer: int) -> int:
        """A transformer block: the inputs and statistics of both norms, attention, and MLP or experts."""
        norms = self.outside * 2 * (self.width + 2 * FP32)
        attention = self._mla() if self.shape.mla else self._attention()
        if self.shape.has_experts(layer):
            return norms + attention + self._experts()
        return norms + attention + self.outside * self.width + self._mlp(self.shape.ffn_size)

    def head(self) -> int:
        """The input of the final norm, and the gradients that the loss computes in its forward."""
        weight = self.shape.padded_vocab_size // self.tp * self.shape.hidden_size * FP32
        return (self.outside + self.tokens) * self.width + weight

    def working(self, *, has_head: bool) -> int:
        """Temporaries: the gradients inside a block, or a chunk of logits in the loss."""
        moe, columns = self.shape.moe, self.shape.padded_vocab_size // self.tp
        inner = max(self.shape.ffn_size, moe.topk * moe.ffn_size if moe else 0) // self.tp
        block = self.tokens * 3 * (inner * self.itemsize + self.width)
        tokens = min(self.tokens, max(MIN_CHUNK_TOKENS, CHUNK_ELEMENTS[self.device] // columns))
        is_low = self.itemsize < FP32  # logits are converted for the softmax, wgrads for their sum over chunks
        logits = tokens * columns * (2 * FP32 + is_low * self.itemsize) + is_low * columns * self.width
        return max(block, has_head * logits)

    def _attention(self) -> int:
        shape, heads = self.shape, self.shape.num_heads // self.tp
        groups = max(1, shape.num_query_groups // self.tp)
        normed = (heads + groups) * (shape.head_dim * self.itemsize + FP32) if shape.has_qk_norm else 0
        return self.outside * self.width + self.tokens * normed + self._core_attention(heads, groups)

    def _mla(self) -> int:
        """The input, and the compressed vectors before and after their norms."""
        mla, heads = self.shape.mla, self.shape.num_heads // self.tp
        assert mla is not None, "callers check it"
        compressed = 2 * (mla.q_lora_rank or 0) + 2 * mla.kv_lora_rank + mla.rope_dim
        return self.outside * (self.width + compressed * self.itemsize) + self._core_attention(heads, heads)

    def _core_attention(self, heads: int, groups: int) -> int:
        """Query, key, value, output, its log-sum-exp, and the mask, which SDPA keeps in the dtype of the queries."""
        shape, is_ring, is_cpu = self.shape, self.cp_comm_type == "p2p", self.device == "cpu"
        value_dim = shape.value_head_dim
        is_padded = is_cpu and value_dim < shape.head_dim
        # The next layer keeps the output again where it was sliced, concatenated or sent.
        outputs = value_dim if is_padded or self.cp_comm_type in ("allgather", "a2a") else 0
        outputs += shape.head_dim if is_padded else value_dim
        if is_cpu and not is_ring:  # SDPA gets repeated key/value heads and padded value heads
            groups, value_dim = heads, max(value_dim, shape.head_dim) if is_padded else value_dim
        elif shape.mla:
            value_dim += shape.mla.nope_dim  # values are views of what kv_up returns
        key_value = groups * (shape.head_dim + value_dim) * (self.cp if self.cp_comm_type == "allgather" else 1)
        kept = self.tokens * ((heads * (shape.head_dim + outputs) + key_value) * self.itemsize + heads * FP32)
        mask = (self.seq_length * self.cp) ** 2 if self.has_segments and not is_ring else 0
        if self.cp_comm_type == "allgather":  # two chunks of queries; together they see 2 cp + 1 chunks of keys
            mask = (self.seq_length // 2) ** 2 * (2 * self.cp + 1)
        return kept + mask * (self.batch_size if self.has_segments else 1) * self.itemsize

    def _mlp(self, inner: int) -> int:
        """Up and its activation; with a gate also the gate and the product."""
        return self.tokens * inner // self.tp * (4 if self.shape.is_gated else 2) * self.itemsize

    def _experts(self) -> int:
        """Router, permuted tokens before, inside and after the experts (evenly routed), shared expert."""
        moe = self.shape.moe
        assert moe is not None, "callers check it"
        routed, is_low = self.tokens // self.tp, self.itemsize < FP32  # each tp rank routes a slice of the sequence
        router = routed * (ROUTER_TENSORS * moe.num_experts + self.shape.hidden_size) * FP32
        router += is_low * moe.num_experts * self.shape.hidden_size * FP32
        inner = moe.ffn_size // self.etp * (4 if self.shape.is_gated else 2) * self.itemsize
        pairs = routed * moe.topk
        experts = pairs * self.etp * (self.width + inner + 2 * INT64) + pairs * (self.width + 2 * INT64 + FP32)
        if moe.shared_ffn_size is None:
            return router + experts
        is_copied = is_low or (self.tp > 1 and not self.sequence_parallel)  # by the router, which keeps the copy
        return router + experts + is_copied * self.outside * self.width + self._mlp(moe.shared_ffn_size)
