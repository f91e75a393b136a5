"""The tables of attention by card."""

from benchmarks.attention_cards import chosen, mla_cost


def test_multi_latent_attention_is_cheaper_by_the_chosen_backend_of_blackwell() -> None:
    assert chosen("B200", "192 and 128") == "cudnn" != chosen("A100", "192 and 128")
    before, after = (mla_cost("b200", flag) for flag in ("flash", "auto"))
    assert before.layer_ms > 2 * after.layer_ms
    assert after.tokens_per_s > 1.15 * before.tokens_per_s
