"""Hashing across turns: a turn that extends a known prompt hashes only its new tokens, and gets the same keys."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from cachesvc.connector.memory import PromptMemory
from cachesvc.connector.passes import Pass
from cachesvc.keys import Namespace, PrefixHasher, chain_keys, token_bytes

NAMESPACE = Namespace("m", "1", "float32")


def hashed_pass(tokens: list[int], memory: PromptMemory, salt: bytes = b"") -> Pass:
    p = Pass(tokens, PrefixHasher(NAMESPACE, salt=salt), seed=(salt, b""), memory=memory)
    assert p.hash(wait=True)
    return p


def test_a_turn_hashes_only_what_is_new(monkeypatch: Any) -> None:
    hashed: list[int] = []
    original = PrefixHasher.extend_bytes
    monkeypatch.setattr(
        PrefixHasher, "extend_bytes", lambda self, data: (hashed.append(len(data) // 4), original(self, data))[1]
    )
    memory = PromptMemory(8, 1 << 20)
    first = list(range(1000))
    p = hashed_pass(first, memory)
    p.add([5000])
    p.add([5001])
    assert p.hash(wait=True)
    second = [*first, 5000, 5001, *range(2000, 2300)]
    assert hashed_pass(second, memory).keys == chain_keys(NAMESPACE, second)
    assert hashed[:4] == [1000, 1, 1, 302]


def test_another_salt_or_another_beginning_knows_nothing_of_it() -> None:
    memory = PromptMemory(8, 1 << 20)
    tokens = list(range(400))
    hashed_pass(tokens, memory)
    assert hashed_pass(tokens, memory, salt=b"x").keys == chain_keys(NAMESPACE, tokens, salt=b"x")
    other = [7, *tokens[1:]]
    assert hashed_pass(other, memory).keys == chain_keys(NAMESPACE, other)


PROMPTS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 700), st.integers(0, 2)), min_size=1, max_size=12)


@given(PROMPTS, st.integers(1, 4), st.integers(600, 4000))
def test_any_history_of_prompts_gives_the_keys_of_a_fresh_hash(
    prompts: list[tuple[int, int, int]], limit: int, max_bytes: int
) -> None:
    memory = PromptMemory(limit, max_bytes)
    for beginning, length, salt in prompts:
        tokens = [beginning, *range(length), beginning]
        assert hashed_pass(tokens, memory, bytes(salt)).keys == chain_keys(NAMESPACE, tokens, salt=bytes(salt))


def test_the_memory_is_bounded() -> None:
    memory = PromptMemory(3, 5000)
    for number in range(10):
        hashed_pass([number] * 256, memory)
    assert len(memory._prompts) == 3 and memory._bytes == 3 * 1024
    hashed_pass(list(range(2000)), memory)
    assert len(memory._prompts) == 0 and memory._bytes == 0, "one prompt larger than the bound is not kept"
    assert memory.recall((b"", b""), token_bytes([9] * 256)) is None
