"""Every turn is one trace: router, lease service, connector and vLLM in one tree."""

from __future__ import annotations

from click.testing import CliRunner
from engines.turns import Client, new_conversation, text
from otlp_receiver import Receiver, Span

from kvlease.cli.main import cli
from kvlease.cli.stack import Stack

CHILDREN = {
    "ttft": "turn",
    "route": "turn",
    "prefill": "turn",
    "decode": "turn",
    "lease.claim": "prefill",
    "kv.pull": "prefill",
    "lease.grant": "turn",
}
"""Span → its parent (see docs/tracing.md)."""

SERVED = {
    "lease_service.start_turn": "route",
    "lease_service.claim": "lease.claim",
    "lease_service.grant": "lease.grant",
}
"""The same of the lease service's own spans."""

ENGINES = ("kvlease-prefill", "vllm-prefill", "kvlease-decode", "vllm-decode")


def two_turns(client: Client) -> tuple[str, str]:
    """Trace ids of a first turn and of one that hits. (A claim has 50 ms, which is not
    always enough on a machine that is busy with something else.)"""
    for _ in range(3):
        conversation = new_conversation("traced")
        messages = [{"role": "user", "content": text(1200, seed=1)}]
        first = client.chat(messages, conversation)
        messages += [
            {"role": "assistant", "content": first.text},
            {"role": "user", "content": text(100, seed=2)},
        ]
        second = client.chat(messages, conversation)
        if second.outcome == "hit":
            break
    assert second.outcome == "hit"
    return first.trace_id, second.trace_id


def whole_trace(receiver: Receiver, trace_id: str) -> list[Span]:
    """Spans of a hit, once all are there. Everybody exports on their own: the last span of
    a turn may come before the first of another service."""

    def all_are_there(spans: list[Span]) -> bool:
        names = [span.name for span in spans if span.trace_id == trace_id]
        return {"turn", *CHILDREN, *SERVED} <= set(names) and names.count("llm_request") >= 2

    receiver.wait_until(all_are_there, timeout_s=30)
    return receiver.trace(trace_id)


def parent_of(span: Span, spans: list[Span]) -> str:
    names = [other.name for other in spans if other.span_id == span.parent_id]
    return names[0] if names else ""


def test_a_hit_is_one_tree_from_the_router_to_vllm(client: Client, receiver: Receiver) -> None:
    # when a second turn hits
    first, second = two_turns(client)
    spans = whole_trace(receiver, second)
    by_name = {span.name: span for span in spans}

    # then every span is there, under its parent, the lease service's under its caller's
    for name, parent in (CHILDREN | SERVED).items():
        assert parent_of(by_name[name], spans) == parent, name
    assert by_name["turn"].parent_id == ""

    # and vLLM's own spans, of both engines, are in the same trace
    parents = sorted(parent_of(s, spans) for s in spans if s.name == "llm_request")
    assert parents == ["decode", "prefill"]

    # and each says who made it, the connector and vLLM which engine, and which start of it
    for span in spans:
        assert span.resource["service.namespace"] == "kvlease"
        assert span.resource["service.version"]
    makers = {s.service: s.resource["service.instance.id"] for s in spans}
    assert set(makers) == {"kvlease-router", "kvlease-lease-service", *ENGINES}
    for role in ("prefill", "decode"):
        assert makers[f"kvlease-{role}"] == makers[f"vllm-{role}"]
        assert makers[f"vllm-{role}"].startswith(f"{role}-")

    # and the turn links to the one whose blocks it reused
    first_turn = receiver.wait_for(first, "turn", timeout_s=20)["turn"]
    assert first_turn.span_id in by_name["turn"].links


def test_kvlease_trace_shows_it_all(client: Client, receiver: Receiver, stack: Stack) -> None:
    # given a turn whose spans have gone through the stack's own receiver
    _, second = two_turns(client)
    whole_trace(receiver, second)

    result = CliRunner().invoke(cli, ["trace", second, "--dir", str(stack.options.directory)])

    assert result.exit_code == 0, result.output
    assert result.output.count("─ llm_request ") == 2
    for name in [*CHILDREN, *SERVED]:
        assert f"─ {name} " in result.output, result.output


def test_the_spans_of_a_hit_say_what_happened(client: Client, receiver: Receiver) -> None:
    _, second = two_turns(client)
    spans = receiver.wait_for(second, "turn", *CHILDREN, timeout_s=20)

    turn, pull = spans["turn"].attributes, spans["kv.pull"].attributes
    assert turn["kvlease.outcome"] == "hit"
    assert turn["kvlease.turn"] == 2
    assert turn["kvlease.reused_tokens"] == pull["kvlease.tokens"] > 1000
    # 8 layers, key and value, 2 heads of 64 float32
    assert pull["kvlease.bytes"] == pull["kvlease.tokens"] * 8 * 2 * 2 * 64 * 4
    assert pull["kvlease.source_engine"].startswith("decode-")
    assert spans["lease.claim"].attributes["kvlease.outcome"] == "hit"
    assert spans["lease.grant"].attributes["kvlease.granted"] is True
    # and they lie in one another in time
    ttft, root = spans["ttft"], spans["turn"]
    assert root.start_ns <= ttft.start_ns <= ttft.end_ns <= root.end_ns
    assert spans["lease.claim"].end_ns <= spans["kv.pull"].start_ns
    assert spans["kv.pull"].end_ns <= spans["decode"].start_ns


def test_a_client_s_trace_goes_on(client: Client, receiver: Receiver) -> None:
    trace_id, span_id = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    turn = client.chat(
        [{"role": "user", "content": "hello"}],
        new_conversation("client-trace"),
        headers={"traceparent": f"00-{trace_id}-{span_id}-01"},
    )
    assert turn.trace_id == trace_id
    spans = receiver.wait_for(trace_id, "turn")
    assert spans["turn"].parent_id == span_id
