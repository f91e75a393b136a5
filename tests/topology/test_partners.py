"""Partners are on other hosts, in other racks where that is possible, and share the work."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from nanotrain.topology.partners import Host, plan_partners


@given(st.integers(2, 12), st.integers(1, 8))
def test_equal_hosts_have_partners_on_other_hosts_one_for_each_rank(hosts: int, ranks: int) -> None:
    names = [Host(f"h{host:02}") for host in range(hosts) for _ in range(ranks)]
    partners = plan_partners(names)

    for rank, partner in enumerate(partners):
        assert partner is not None and names[partner].name != names[rank].name
    # with an odd number of ranks one of them keeps two copies
    assert max(Counter(partners).values()) <= 1 + len(names) % 2


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 4))
def test_an_even_number_of_racks_has_partners_in_other_racks(
    pairs: int, hosts: int, ranks: int
) -> None:
    names = [
        Host(f"r{rack}h{host}", rack=f"r{rack}")
        for host in range(hosts)
        for rack in range(2 * pairs)
        for _ in range(ranks)
    ]
    for rank, partner in enumerate(plan_partners(names)):
        assert partner is not None and names[partner].rack != names[rank].rack


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=12))
def test_a_partner_is_never_on_the_same_host(names: list[str]) -> None:
    partners = plan_partners([Host(name) for name in names])

    for rank, partner in enumerate(partners):
        assert partner is None or names[partner] != names[rank]
    assert (None in partners) == (len(set(names)) == 1)
