"""Core attention on one rank: SDPA, varlen, FlexAttention and chunked attention behind one signature."""
