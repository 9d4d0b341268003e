"""The prefix proof: equal exactly where tokens and everything else are."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlease import prefix

SEED = prefix.seed_for("tenant", "model", "", "", "")

token_ids = st.lists(st.integers(0, 2**32 - 1), max_size=60)


@given(
    shared=token_ids,
    ours=token_ids,
    theirs=token_ids,
    chunk_tokens=st.integers(1, 9),
)
def test_chunks_match_exactly_as_far_as_the_tokens_do(
    shared: list[int], ours: list[int], theirs: list[int], chunk_tokens: int
) -> None:
    a, b = shared + ours, shared + theirs
    equal = 0
    while equal < min(len(a), len(b)) and a[equal] == b[equal]:
        equal += 1
    matched = prefix.matching_chunks(
        prefix.prove(a, seed=SEED, chunk_tokens=chunk_tokens).chunk_digests,
        prefix.prove(b, seed=SEED, chunk_tokens=chunk_tokens).chunk_digests,
    )
    assert matched == equal // chunk_tokens


@given(tokens=token_ids, more=token_ids, chunk_tokens=st.integers(1, 9))
def test_a_reader_computes_the_tail_digest_of_any_prefix(
    tokens: list[int], more: list[int], chunk_tokens: int
) -> None:
    lease = prefix.prove(tokens, seed=SEED, chunk_tokens=chunk_tokens)
    prompt = tokens + more
    proof = prefix.prove(prompt, seed=SEED, chunk_tokens=chunk_tokens)
    assert prefix.tail_digest(proof, prompt, len(tokens), seed=SEED) == lease.tail_digest


@given(
    tokens=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=60),
    chunk_tokens=st.integers(2, 9),
    data=st.data(),
)
def test_one_other_token_in_the_tail_changes_its_digest(
    tokens: list[int], chunk_tokens: int, data: st.DataObject
) -> None:
    lease = prefix.prove(tokens, seed=SEED, chunk_tokens=chunk_tokens)
    if not lease.tail_digest:
        return
    full = len(tokens) // chunk_tokens * chunk_tokens
    position = data.draw(st.integers(full, len(tokens) - 1))
    other = list(tokens)
    other[position] ^= 1
    proof = prefix.prove(other, seed=SEED, chunk_tokens=chunk_tokens)
    assert prefix.tail_digest(proof, other, len(other), seed=SEED) != lease.tail_digest


@given(tokens=token_ids, chunk_tokens=st.integers(1, 9))
def test_a_proof_has_one_digest_a_chunk_and_one_for_the_rest(
    tokens: list[int], chunk_tokens: int
) -> None:
    proof = prefix.prove(tokens, seed=SEED, chunk_tokens=chunk_tokens)
    full, rest = divmod(len(tokens), chunk_tokens)
    assert len(proof.chunk_digests) == full * prefix.DIGEST_SIZE
    assert len(proof.tail_digest) == (prefix.DIGEST_SIZE if rest else 0)
    assert proof.num_tokens == len(tokens)


def test_the_same_tokens_at_another_place_do_not_match() -> None:
    chunk = list(range(4))
    proof = prefix.prove(chunk * 3, seed=SEED, chunk_tokens=4)
    digests = {proof.chunk_digests[i : i + 16] for i in range(0, 48, 16)}
    assert len(digests) == 3


@pytest.mark.parametrize("part", range(5))
def test_every_part_of_the_seed_keeps_sequences_apart(part: int) -> None:
    parts = ["acme", "qwen", "v1", "lora", "salt"]
    other = [*parts]
    other[part] += "x"
    tokens = list(range(8))
    ours = prefix.prove(tokens, seed=prefix.seed_for(*parts), chunk_tokens=4)
    theirs = prefix.prove(tokens, seed=prefix.seed_for(*other), chunk_tokens=4)
    assert prefix.matching_chunks(ours.chunk_digests, theirs.chunk_digests) == 0


def test_parts_of_the_seed_do_not_run_into_each_other() -> None:
    assert prefix.seed_for("ab", "c", "", "", "") != prefix.seed_for("a", "bc", "", "", "")


@pytest.mark.parametrize(
    ("block_size", "chunk_tokens"),
    [(1, 256), (16, 256), (32, 256), (48, 240), (96, 288), (128, 256), (512, 512), (1000, 1000)],
)
def test_a_chunk_is_the_multiple_of_the_block_size_nearest_to_256(
    block_size: int, chunk_tokens: int
) -> None:
    assert prefix.chunk_tokens_for(block_size) == chunk_tokens


@given(st.integers(1, 5000))
def test_no_other_multiple_of_the_block_size_is_nearer_to_256(block_size: int) -> None:
    chunk = prefix.chunk_tokens_for(block_size)
    assert chunk % block_size == 0
    nearest = min(abs(256 - n * block_size) for n in range(1, 258))
    assert abs(256 - chunk) == nearest


@pytest.mark.parametrize("block_size", [0, -16])
def test_a_block_size_that_is_not_positive_is_refused(block_size: int) -> None:
    with pytest.raises(ValueError, match="not positive"):
        prefix.chunk_tokens_for(block_size)


def test_a_tail_beyond_the_proof_is_refused() -> None:
    proof = prefix.prove([1, 2, 3], seed=SEED, chunk_tokens=2)
    with pytest.raises(ValueError, match="lies after the last"):
        prefix.tail_digest(proof, [1, 2, 3], 4, seed=SEED)


def test_digests_do_not_depend_on_the_process() -> None:
    """Python's ``hash`` of text differs from process to process; a proof must not."""
    program = (
        "from kvlease import prefix;"
        "seed = prefix.seed_for('t', 'm', '', '', '');"
        "print(prefix.prove(range(600), seed=seed, chunk_tokens=256).chunk_digests.hex())"
    )
    seen = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=30,
        ).stdout
        for hash_seed in ("1", "2")
    }
    seed = prefix.seed_for("t", "m", "", "", "")
    here = prefix.prove(range(600), seed=seed, chunk_tokens=256).chunk_digests.hex()
    assert seen == {here + "\n"}


def test_a_digest_is_what_the_api_says_it_is() -> None:
    """PrefixProof in protos/kvlease/v1/lease.proto, computed by the letter."""
    from hashlib import blake2b

    first = blake2b(bytes(16) + b"\x01\0\0\0\x02\0\0\0", digest_size=16, key=SEED).digest()
    tail = blake2b(first + b"\x03\0\0\0", digest_size=16, key=SEED).digest()
    proof = prefix.prove([1, 2, 3], seed=SEED, chunk_tokens=2)
    assert (proof.chunk_digests, proof.tail_digest) == (first, tail)


def test_a_hundred_thousand_tokens_take_milliseconds() -> None:
    tokens = list(range(100_000))
    fastest = min(_seconds(tokens) for _ in range(3))
    assert fastest < 0.05  # about 2 ms; a loop over tokens in Python would take longer


def _seconds(tokens: list[int]) -> float:
    started = time.perf_counter()
    prefix.prove(tokens, seed=SEED, chunk_tokens=256)
    return time.perf_counter() - started
