"""compose/compose.yaml on real containers: turns hit whichever replica dies, traces and
metrics arrive, and everything ends in order. The tests run in the order of this file."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import grpc
from compose.compose_stack import SERVICES, ComposeStack
from engines.test_trace import CHILDREN, SERVED, parent_of, whole_trace
from engines.turns import Client, Turn, new_conversation, text
from grpc_health.v1 import health_pb2, health_pb2_grpc
from metric_names import OPENMETRICS, TEXT, scrape, used
from otlp_receiver import Receiver

from kvlease.v1 import common_pb2, lease_pb2, lease_pb2_grpc

README = Path(__file__).parents[2] / "README.md"

OURS = ("registry", "lease", "router", "prefill", "decode", "front")

RARE = {
    "kvlease_grants_refused_total",
    "kvlease_engine_errors_total",
    "kvlease_engine_registrations_total",
}
"""Metrics that only failures and starts bring about: see tests/services/test_metrics.py."""


class Conversation:
    """A history that grows with every turn."""

    def __init__(self, stack: ComposeStack) -> None:
        self.id = new_conversation("compose")
        self._client = Client(stack.http, "model")
        self._messages: list[dict[str, str]] = []

    def turn(self, num_chars: int = 400) -> Turn:
        """The next one: so many characters more."""
        question = text(num_chars, seed=len(self._messages))
        self._messages.append({"role": "user", "content": question})
        answered = self._client.chat(self._messages, self.id)
        self._messages.append({"role": "assistant", "content": answered.text})
        return answered


def test_the_second_command_of_the_readme_shows_a_hit(compose_stack: ComposeStack) -> None:
    command = "    docker compose -f compose/compose.yaml exec "
    (line,) = (line for line in README.read_text().splitlines() if line.startswith(command))
    service, *arguments = line.removeprefix(command).split()

    told = json.loads(compose_stack.compose("exec", "-T", service, *arguments, "--json"))

    assert [turn["outcome"] for turn in told["turns"]] == ["miss_no_lease", "hit", "hit"]


def test_three_turns_hit_and_go_on_hitting_whatever_dies(compose_stack: ComposeStack) -> None:
    # given a conversation through the published port
    talk = Conversation(compose_stack)
    first, second, third = talk.turn(1500), talk.turn(), talk.turn()
    assert [first.outcome, second.outcome, third.outcome] == ["miss_no_lease", "hit", "hit"]
    # (The answers are noise that is not always UTF-8: reuse ends at a chunk before one.)
    assert third.reused_tokens >= second.reused_tokens > 1000

    # when a replica of each kind is killed, and etcd starts anew
    compose_stack.kill_one("router")
    without_router = talk.turn()
    compose_stack.kill_one("lease")
    without_lease = talk.turn()
    compose_stack.restart("etcd")
    compose_stack.wait_ready()
    after_restart = talk.turn()

    # then every turn still hits, and is the conversation's next
    turns = [third, without_router, without_lease, after_restart]
    assert [turn.outcome for turn in turns] == ["hit"] * 4
    assert [turn.number for turn in turns] == [3, 4, 5, 6]


def test_grpc_is_published(compose_stack: ComposeStack) -> None:
    talk = Conversation(compose_stack)
    talk.turn(1500)
    for address in (compose_stack.registry, compose_stack.lease, compose_stack.router):
        with grpc.insecure_channel(address) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            status = health.Check(health_pb2.HealthCheckRequest(), timeout=5).status
            assert status == health_pb2.HealthCheckResponse.SERVING
    with grpc.insecure_channel(compose_stack.lease) as channel:
        conversation = common_pb2.Conversation(
            tenant="default", model="model", conversation_id=talk.id
        )
        # It begins with whether there is a lease, which comes just after the turn's answer.
        events = lease_pb2_grpc.LeaseServiceStub(channel).WatchLeases(
            lease_pb2.WatchLeasesRequest(), timeout=20
        )
        assert any(event.lease.conversation == conversation for event in events)


def test_a_hit_is_one_trace_over_all_containers(
    compose_stack: ComposeStack, compose_receiver: Receiver
) -> None:
    # given two turns, the second of which hits
    talk = Conversation(compose_stack)
    first, second = talk.turn(1500), talk.turn()
    assert second.outcome == "hit"

    # then its trace is complete, and every span has its parent
    spans = whole_trace(compose_receiver, second.trace_id)
    by_name = {span.name: span for span in spans}
    parents = CHILDREN | SERVED
    assert {name: parent_of(by_name[name], spans) for name in parents} == parents
    assert by_name["turn"].parent_id == ""
    assert sorted(parent_of(s, spans) for s in spans if s.name == "llm_request") == [
        "decode",
        "prefill",
    ]
    assert {span.service for span in spans} == {
        "kvlease-router",
        "kvlease-lease-service",
        "kvlease-prefill",
        "kvlease-decode",
        "vllm-prefill",
        "vllm-decode",
    }

    # and the containers' clocks agree on their order
    order = ["turn", "route", "prefill", "lease.claim", "kv.pull", "decode"]
    assert all(by_name[a].start_ns <= by_name[b].start_ns for a, b in pairwise(order))
    assert by_name["lease.claim"].end_ns <= by_name["kv.pull"].start_ns
    assert by_name["kv.pull"].end_ns <= by_name["prefill"].end_ns <= by_name["decode"].start_ns
    turn, ttft = by_name["turn"], by_name["ttft"]
    assert turn.start_ns <= ttft.start_ns <= ttft.end_ns <= turn.end_ns

    # and they say what happened
    assert turn.attributes["kvlease.outcome"] == "hit"
    assert turn.attributes["kvlease.reused_tokens"] == second.reused_tokens
    assert by_name["kv.pull"].attributes["kvlease.tokens"] == second.reused_tokens
    assert by_name["kv.pull"].attributes["kvlease.source_engine"] == "decode-0"
    (link,) = turn.links
    linked = compose_receiver.wait_for(first.trace_id, "turn", timeout_s=30)["turn"]
    assert linked.span_id == link


def test_what_prometheus_scrapes_is_valid_and_all_that_is_asked_for(
    compose_stack: ComposeStack,
) -> None:
    targets = compose_stack.targets()
    assert scrape(targets, TEXT).lack(use for use in used() if use.metric not in RARE) == []
    ours = [url for url in targets if ":9464/" in url]
    assert len(ours) >= 3  # registry, lease service, router; the engines' are vLLM's
    assert scrape(ours, OPENMETRICS).families


def test_our_containers_may_do_little(compose_stack: ComposeStack) -> None:
    for service in OURS:
        for container in compose_stack.containers(service):
            found = compose_stack.inspect(container)
            assert found["Config"]["User"] not in ("", "0", "root"), service
            assert found["HostConfig"]["ReadonlyRootfs"], service
            assert found["HostConfig"]["CapDrop"] == ["ALL"], service
            assert found["HostConfig"]["Memory"] > 0, service


def test_ports_are_published_on_this_machine_alone(compose_stack: ComposeStack) -> None:
    config = json.loads(compose_stack.compose("config", "--format", "json"))
    ports = [port for service in config["services"].values() for port in service.get("ports", [])]
    assert len(ports) == 7
    assert {port["host_ip"] for port in ports} == {"127.0.0.1"}


def test_down_ends_everything_in_order(compose_stack: ComposeStack) -> None:
    seconds, codes = compose_stack.down()
    assert {name.removeprefix(compose_stack.name)[1:].split("-")[0] for name in codes} == set(
        SERVICES
    )
    assert set(codes.values()) == {0}, codes
    assert seconds < 15
