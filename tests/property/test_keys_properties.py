from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cachesvc.keys import Namespace, PrefixHasher, chain_keys, pack_keys, unpack_keys

NAMESPACE = Namespace(model="m", revision="r", dtype="float32", block_tokens=4)
TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=40)


@given(TOKENS, st.lists(st.integers(0, 40), max_size=6))
def test_growing_a_prompt_in_any_steps_gives_the_same_keys(tokens: list[int], cuts: list[int]) -> None:
    hasher = PrefixHasher(NAMESPACE)
    start = 0
    for cut in [*sorted(cuts), len(tokens)]:
        hasher.extend(tokens[start:cut])
        start = max(start, cut)
    assert hasher.keys == chain_keys(NAMESPACE, tokens)
    assert hasher.num_tokens == len(tokens)


@given(TOKENS, TOKENS)
def test_keys_agree_exactly_as_far_as_the_blocks_do(one: list[int], two: list[int]) -> None:
    shared = 0
    while one[shared : shared + 4] == two[shared : shared + 4] and len(one) >= shared + 4 <= len(two):
        shared += 4
    ours, theirs = chain_keys(NAMESPACE, one), chain_keys(NAMESPACE, two)
    assert ours[: shared // 4] == theirs[: shared // 4]
    assert not set(ours[shared // 4 :]) & set(theirs[shared // 4 :])


@given(st.binary(max_size=8), st.binary(max_size=8), st.binary(max_size=8), st.binary(max_size=8))
def test_salt_and_adapter_never_run_into_each_other(s1: bytes, a1: bytes, s2: bytes, a2: bytes) -> None:
    same = (s1, a1) == (s2, a2)
    assert (
        chain_keys(NAMESPACE, range(4), salt=s1, adapter=a1) == chain_keys(NAMESPACE, range(4), salt=s2, adapter=a2)
    ) == same


@given(st.lists(st.binary(min_size=16, max_size=16)))
def test_packing_keys_is_reversible(keys: list[bytes]) -> None:
    assert unpack_keys(pack_keys(keys)) == keys
