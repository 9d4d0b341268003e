"""Whose turn, of which conversation, on which engines."""

from __future__ import annotations

from typing import Any

import pytest

from kvlease.router import rules
from kvlease.router.rules import Candidate, InvalidRequest, UnknownKey
from kvlease.v1 import lease_pb2, registry_pb2

KEYS = {"sk-1": "acme"}


def engine(engine_id: str, **fields: Any) -> registry_pb2.Engine:
    return registry_pb2.Engine(
        engine_id=engine_id, **{"incarnation": engine_id, "model": "m", **fields}
    )


def lease(holder: str, incarnation: str = "") -> lease_pb2.Lease:
    return lease_pb2.Lease(holder_engine_id=holder, holder_incarnation=incarnation or holder)


def chosen(choice: rules.Choice) -> str:
    return choice.engine.engine_id if choice.engine else ""


# --- tenant -----------------------------------------------------------------------------


def test_without_api_keys_every_request_is_the_default_tenant_s() -> None:
    assert rules.tenant_of("", None) == "default"
    assert rules.tenant_of("Bearer anything", None) == "default"


@pytest.mark.parametrize("header", ["Bearer sk-1", "bearer sk-1", " Bearer  sk-1 "])
def test_an_api_key_names_its_tenant(header: str) -> None:
    assert rules.tenant_of(header, KEYS) == "acme"


@pytest.mark.parametrize("header", ["", "sk-1", "Bearer", "Bearer sk-2", "Basic sk-1"])
def test_an_unknown_api_key_is_refused(header: str) -> None:
    with pytest.raises(UnknownKey):
        rules.tenant_of(header, KEYS)


# --- conversation -----------------------------------------------------------------------

ALL = {"conversation_id": "body", "prompt_cache_key": "key"}
HEADERS = {"X-Conversation-ID": "first", "X-Session-ID": "second"}


@pytest.mark.parametrize(
    ("body", "headers", "expected"),
    [
        (ALL, HEADERS, "body"),
        ({**ALL, "conversation_id": None}, HEADERS, "first"),
        ({**ALL, "conversation_id": ""}, {"X-Session-ID": "second"}, "second"),
        ({"prompt_cache_key": "key"}, {}, "key"),
        ({}, {}, ""),
    ],
)
def test_the_conversation_id_is_looked_for_in_this_order(
    body: dict[str, Any], headers: dict[str, str], expected: str
) -> None:
    assert rules.conversation_id_of(body, headers) == expected


@pytest.mark.parametrize("value", [5, ["a"], {"a": 1}, "x" * 513, "\ud800", "é" * 257])
def test_a_conversation_id_that_cannot_name_one_is_refused_by_name(value: Any) -> None:
    with pytest.raises(InvalidRequest, match="conversation_id"):
        rules.conversation_id_of({"conversation_id": value}, {})


def test_a_conversation_id_may_have_512_bytes() -> None:
    assert rules.conversation_id_of({"conversation_id": "é" * 256}, {}) == "é" * 256


# --- headers ----------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "ten"])
def test_a_retention_must_be_a_positive_number_of_seconds(text: str) -> None:
    with pytest.raises(InvalidRequest, match="x-kvlease-retain"):
        rules.retention_of(text)


def test_a_retention_is_in_seconds_and_may_be_absent() -> None:
    assert rules.retention_of("600") == 600.0
    assert rules.retention_of("") is None


def test_a_switch_knows_two_words() -> None:
    assert rules.switch_of("OFF", "x-kvlease-reuse", ("off", "on")) is False
    with pytest.raises(InvalidRequest, match="x-kvlease-reuse"):
        rules.switch_of("never", "x-kvlease-reuse", ("off", "on"))


@pytest.mark.parametrize("value", ["a\nb", "x" * 129, "", None, 5, "sp ace", "é"])
def test_a_request_id_that_could_do_harm_is_not_taken(value: object) -> None:
    assert rules.request_id_of(value) == ""


# --- engines ----------------------------------------------------------------------------


def test_the_engine_with_the_fewest_requests_is_chosen() -> None:
    candidates = [Candidate(engine("p0"), in_flight=2), Candidate(engine("p1"), in_flight=1)]

    choice = rules.choose_prefill(candidates, "c")

    assert chosen(choice) == "p1"
    assert choice.reason == "p1 has the fewest requests in flight (1) of 2 engines"


def test_among_equals_a_conversation_always_falls_on_the_same_engine() -> None:
    candidates = [Candidate(engine(f"p{i}")) for i in range(4)]

    picks = {c: chosen(rules.choose_prefill(candidates, c)) for c in map(str, range(64))}
    fewer = [candidate for candidate in candidates if candidate.engine.engine_id != "p2"]

    assert set(picks.values()) == {"p0", "p1", "p2", "p3"}
    for conversation, pick in picks.items():
        if pick != "p2":  # only its conversations move when an engine goes
            assert chosen(rules.choose_prefill(fewer, conversation)) == pick


def test_suspect_and_departed_engines_come_last_in_that_order() -> None:
    busy = Candidate(engine("busy"), in_flight=9)
    suspect = Candidate(engine("suspect"), suspect=True)
    departed = Candidate(engine("departed"), departed=True)

    assert chosen(rules.choose_prefill([departed, suspect, busy], "c")) == "busy"
    assert chosen(rules.choose_prefill([departed, suspect], "c")) == "suspect"
    assert chosen(rules.choose_prefill([departed], "c")) == "departed"


def test_draining_and_excluded_engines_are_never_chosen() -> None:
    draining = Candidate(engine("d0", state=registry_pb2.ENGINE_STATE_DRAINING))
    failed = Candidate(engine("d1"))

    assert rules.choose_decode([draining], None, "c") == rules.Choice(
        None, "all decode engines of this model are draining (d0)"
    )
    assert "no other" in rules.choose_decode([draining, failed], None, "c", {"d1"}).reason
    assert "registered" in rules.choose_decode([], None, "c").reason


def test_decode_goes_to_the_lease_s_holder_however_busy() -> None:
    candidates = [Candidate(engine("d0"), in_flight=9), Candidate(engine("d1"))]

    choice = rules.choose_decode(candidates, lease("d0"), "c")

    assert chosen(choice) == "d0"
    assert choice.reason == "d0 holds the conversation's blocks"


DRAINING = registry_pb2.ENGINE_STATE_DRAINING


@pytest.mark.parametrize(
    ("holder", "word"),
    [
        (Candidate(engine("d0", state=DRAINING)), "draining"),
        (Candidate(engine("d0"), suspect=True), "failed a moment ago"),
        (Candidate(engine("d0"), departed=True), "session has ended"),
        (Candidate(engine("d0", incarnation="new")), "is gone"),
        (None, "is gone"),
    ],
)
def test_decode_leaves_a_holder_that_is_gone_or_going_and_says_so(
    holder: Candidate | None, word: str
) -> None:
    other = Candidate(engine("d1"))
    candidates = [other] if holder is None else [holder, other]
    if holder is not None and holder.engine.incarnation == "new":
        other = holder  # a restarted engine is as good as any

    choice = rules.choose_decode(candidates, lease("d0"), "c")

    assert word in choice.reason
    assert choice.engine is not None
    assert (choice.engine.engine_id, choice.engine.incarnation) != ("d0", "d0")


def test_decode_leaves_a_holder_that_has_just_failed_the_turn() -> None:
    candidates = [Candidate(engine("d0")), Candidate(engine("d1"))]

    assert chosen(rules.choose_decode(candidates, lease("d0"), "c", {"d0"})) == "d1"
