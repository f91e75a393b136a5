"""What one mixture-of-experts layer sends per microbatch and rank, in closed form: pure, for plans and for tests.

    ExpertTraffic   one layer as a rank sees it
    ep_bytes        over ep: rows to their experts and back, and the counts
    etp_bytes       over etp: rows to all slices of an expert and back, and the counts

How many rows leave a rank depends on what its tokens choose: these are the bytes where the tokens of every rank choose
every expert equally often.
"""

from dataclasses import dataclass

_COUNT_BYTES = 8  # counts travel as int64
_ROW_TRIPS = 4  # there and back, forward and backward


@dataclass(frozen=True)
class ExpertTraffic:
    """One layer on one rank.

    Args:
        tokens: that the rank brings, none of them another rank's too: B * S / (cp * tp).
        topk: experts per token.
        num_experts: over all ranks.
        hidden: H.
        itemsize: bytes of an activation's element.
    """

    tokens: int
    topk: int
    num_experts: int
    hidden: int
    itemsize: int

    @property
    def row_bytes(self) -> int:
        """Of all rows, one per token and choice."""
        return self.tokens * self.topk * self.hidden * self.itemsize


def ep_bytes(traffic: ExpertTraffic, size: int) -> int:
    """Bytes of forward and backward over `size` ranks that share the experts; ledger op "all_to_all".

    >>> ep_bytes(ExpertTraffic(tokens=1024, topk=2, num_experts=8, hidden=64, itemsize=2), 4)
    786480
    """
    counts = traffic.num_experts * _COUNT_BYTES
    return (_ROW_TRIPS * traffic.row_bytes + counts) * (size - 1) // size


def etp_bytes(traffic: ExpertTraffic, size: int) -> int:
    """Bytes of forward and backward over `size` ranks that share every expert; ops "all_to_all" and "all_gather".

    >>> etp_bytes(ExpertTraffic(tokens=1024, topk=2, num_experts=8, hidden=64, itemsize=2), 2)
    1048640
    """
    counts = traffic.num_experts * _COUNT_BYTES  # of this rank's experts from every rank of ep
    return (_ROW_TRIPS * traffic.row_bytes + counts) * (size - 1)
