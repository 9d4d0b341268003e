"""Turns through a real router: what engines get, and what clients get."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from router_stack import Stack, events, running, running_pair, until
from sim_engine import Status

from kvlease.config import ConfigError
from kvlease.router.app import serve_router

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"

JSON = {"Content-Type": "application/json"}

MESSAGES = [{"role": "user", "content": "grüße"}]


@pytest.fixture
async def stack() -> AsyncIterator[Stack]:
    async with running_pair() as made:
        yield made


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "sim", "messages": MESSAGES, **fields}


async def test_a_turn_is_prefilled_handed_over_and_decoded(stack: Stack) -> None:
    prefill, decode = stack.engines["prefill-0"], stack.engines["decode-0"]
    body = chat(conversation_id="c1", max_tokens=50, temperature=0.5, stop=["x"])

    async with stack.client.post(stack.url + CHAT, json=body) as response:
        answer = await response.json()

    assert response.status == 200
    assert answer["choices"][0]["message"]["content"] == "Hello there!"
    (first,), (second,) = prefill.seen, decode.seen
    assert first.body["max_tokens"] == 1
    assert "stop" not in first.body
    assert first.body["messages"] == MESSAGES
    assert first.kv["do_remote_decode"] is True
    assert first.told["turn"] == 1
    assert {**second.body, "kv_transfer_params": None} == {
        "model": "sim",
        "messages": MESSAGES,
        "max_tokens": 50,
        "temperature": 0.5,
        "stop": ["x"],
        "kv_transfer_params": None,
    }
    handed = {**second.kv}
    told = handed.pop("kvlease")
    assert handed["remote_engine_id"] == f"prefill-0-{prefill.incarnation}"
    assert handed["a_field_of_a_newer_vllm"] == {"kept": True}
    assert (told["tenant"], told["conversation_id"], told["turn"]) == ("default", "c1", 1)
    assert 50 < told["handoff_remaining_s"] <= 60
    assert (told["retain_s"], told["end"]) == (None, False)


async def test_both_halves_have_the_client_s_request_id_and_one_trace(stack: Stack) -> None:
    headers = {"X-Request-Id": "mine", "traceparent": f"00-{'a' * 32}-{'b' * 16}-01"}

    async with stack.client.post(stack.url + CHAT, json=chat(), headers=headers) as response:
        await response.read()

    seen = [stack.engines[name].seen[0] for name in ("prefill-0", "decode-0")]
    assert [request.headers["X-Request-Id"] for request in seen] == ["mine", "mine"]
    assert all(request.headers["traceparent"][3:35] == "a" * 32 for request in seen)
    assert seen[0].told["traceparent"] == seen[0].headers["traceparent"]
    assert response.headers["x-request-id"] == "mine"
    assert response.headers["x-kvlease-trace-id"] == "a" * 32


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
async def test_a_stream_reaches_the_client_byte_for_byte(stack: Stack, path: str) -> None:
    body = {"model": "sim", "messages": MESSAGES, "prompt": "x", "stream": True}

    async with stack.client.post(stack.url + path, json=body) as response:
        raw = await response.read()

    assert response.status == 200
    assert response.content_type == "text/event-stream"
    got = events(raw)
    assert got[-1] == "[DONE]"
    key = "delta" if path == CHAT else "text"
    texts = [event["choices"][0][key] for event in got[:-1]]
    texts = [text["content"] for text in texts] if path == CHAT else texts
    assert "".join(texts) == "Hello there!"


async def test_the_outcome_is_told_in_headers(stack: Stack) -> None:
    prefill = stack.engines["prefill-0"]
    assert prefill.report is not None
    prefill.report |= {"outcome": "hit", "reused_tokens": 64}

    async with stack.client.post(stack.url + CHAT, json=chat(conversation_id="c")) as response:
        await response.read()

    assert response.headers["x-kvlease-outcome"] == "hit"
    assert response.headers["x-kvlease-reused-tokens"] == "64"
    assert response.headers["x-kvlease-turn"] == "1"
    assert len(response.headers["x-kvlease-trace-id"]) == 32
    assert await stack.metric('kvlease_turns_total{end="ok",model="sim",outcome="hit"}') == 1
    assert await stack.metric('kvlease_turn_ttft_seconds_count{model="sim",outcome="hit"}') == 1
    assert await stack.metric('kvlease_turn_reused_tokens_total{model="sim"}') == 64
    assert await stack.metric("kvlease_turns_in_flight") == 0


async def test_what_pulls_and_prefills_cost_is_in_metrics_beside_what_was_expected(
    stack: Stack,
) -> None:
    prefill = stack.engines["prefill-0"]
    assert prefill.report is not None
    prefill.report |= {
        "outcome": "hit",
        "claim_s": 0.004,
        "predicted_pull_s": 0.03,
        "predicted_compute_s": 1.5,
        "pull_s": 0.02,
        "pull_bytes": 5000,
        "pull_source": "decode-0",
        "prefill_s": 0.4,
        "predicted_prefill_s": 0.5,
    }
    for _ in range(2):
        async with stack.client.post(stack.url + CHAT, json=chat(conversation_id="c")) as response:
            await response.read()

    source, engine = '{source="decode-0"}', '{engine_id="prefill-0"}'
    assert await stack.metric(f"kvlease_pull_bytes_total{source}") == 10_000
    assert await stack.metric(f"kvlease_pull_seconds_count{source}") == 2
    for name, seconds in {
        'kvlease_turn_claim_seconds_sum{outcome="hit"}': 0.004,
        f"kvlease_pull_seconds_sum{source}": 0.02,
        f"kvlease_pull_predicted_seconds_sum{source}": 0.03,
        f"kvlease_pull_predicted_compute_seconds_sum{source}": 1.5,
        f"kvlease_prefill_seconds_sum{engine}": 0.4,
        f"kvlease_prefill_predicted_seconds_sum{engine}": 0.5,
    }.items():
        assert await stack.metric(name) == pytest.approx(2 * seconds), name


async def test_turns_are_counted_by_the_lease_service(stack: Stack) -> None:
    numbers = []
    for _ in range(3):
        async with stack.client.post(stack.url + CHAT, json=chat(conversation_id="c")) as response:
            await response.read()
        numbers.append(response.headers["x-kvlease-turn"])

    assert numbers == ["1", "2", "3"]


async def test_a_turn_without_a_conversation_has_reuse_off_and_no_turn(stack: Stack) -> None:
    async with stack.client.post(stack.url + CHAT, json=chat()) as response:
        await response.read()

    assert response.headers["x-kvlease-outcome"] == "off"
    assert response.headers["x-kvlease-turn"] == "0"
    assert stack.engines["decode-0"].seen[0].told["conversation_id"] == ""


@pytest.mark.parametrize("header", ["X-Conversation-ID", "X-Session-ID"])
async def test_a_conversation_may_be_named_by_header(stack: Stack, header: str) -> None:
    headers = {header: "by-header"}

    async with stack.client.post(stack.url + CHAT, json=chat(), headers=headers) as response:
        await response.read()

    assert stack.engines["prefill-0"].seen[0].told["conversation_id"] == "by-header"


async def test_reuse_off_recomputes_one_turn_and_still_grants(stack: Stack) -> None:
    headers = {"x-kvlease-reuse": "off"}
    body = chat(conversation_id="c")

    async with stack.client.post(stack.url + CHAT, json=body, headers=headers) as response:
        await response.read()

    assert response.headers["x-kvlease-outcome"] == "off"
    assert stack.engines["prefill-0"].seen[0].told["reuse"] is False
    assert stack.engines["decode-0"].seen[0].told["conversation_id"] == "c"


async def test_retention_and_end_reach_the_decode_engine(stack: Stack) -> None:
    headers = {"x-kvlease-retain": "600", "x-kvlease-end": "true"}
    body = chat(conversation_id="c")

    async with stack.client.post(stack.url + CHAT, json=body, headers=headers) as response:
        await response.read()

    told = stack.engines["decode-0"].seen[0].told
    assert (told["retain_s"], told["end"]) == (600.0, True)


async def test_several_prompts_go_to_the_decode_engine_unsplit(stack: Stack) -> None:
    body = {"model": "sim", "prompt": ["a", "b"], "conversation_id": "c"}

    async with stack.client.post(stack.url + COMPLETION, json=body) as response:
        await response.read()

    assert response.status == 200
    assert response.headers["x-kvlease-outcome"] == "miss_unsupported"
    assert stack.engines["prefill-0"].seen == []
    assert "kv_transfer_params" not in stack.engines["decode-0"].seen[0].body


async def test_prompt_log_probabilities_are_computed_and_may_be_granted(stack: Stack) -> None:
    body = chat(conversation_id="c", prompt_logprobs=1)

    async with stack.client.post(stack.url + CHAT, json=body) as response:
        await response.read()

    assert response.headers["x-kvlease-outcome"] == "miss_unsupported"
    seen = stack.engines["decode-0"].seen[0]
    assert seen.kv["do_remote_prefill"] is False
    assert seen.told["conversation_id"] == "c"


async def test_decode_goes_back_to_the_engine_that_holds_the_lease(stack: Stack) -> None:
    holder = await stack.add("decode", "decode-1")
    for index in range(8):
        name = f"c{index}"
        async with stack.client.post(stack.url + CHAT, json=chat(conversation_id=name)) as response:
            await response.read()
        await stack.grant(holder, name, turn=1)
    before = len(holder.seen)

    for index in range(8):
        body = chat(conversation_id=f"c{index}")
        async with stack.client.post(stack.url + CHAT, json=body) as response:
            await response.read()

    assert len(holder.seen) == before + 8
    assert 0 < before < 8  # first turns are spread


# --- a client's own transfer parameters -------------------------------------------------

EVIL = {"do_remote_decode": True, "remote_host": "evil", "remote_port": 1}

DOORS: dict[str, tuple[str, dict[str, Any], dict[str, str]]] = {
    "the field": (CHAT, chat(kv_transfer_params=EVIL), {}),
    "the field of a completion": (
        COMPLETION,
        {"model": "sim", "prompt": "x", "kv_transfer_params": EVIL},
        {},
    ),
    "an unsplit request": (
        COMPLETION,
        {"model": "sim", "prompt": ["a", "b"], "kv_transfer_params": EVIL},
        {},
    ),
    "several answers": (CHAT, chat(n=2, kv_transfer_params=EVIL), {}),
    "vllm_xargs": (CHAT, chat(vllm_xargs={"kv_transfer_params": "evil", "ok": 1}), {}),
    "vllm_xargs, unsplit": (
        CHAT,
        chat(n=2, vllm_xargs={"kv_transfer_params": ["evil"], "ec_transfer_params": "evil"}),
        {},
    ),
    "encoder cache": (CHAT, chat(ec_transfer_params=EVIL), {}),
    "kvlease inside": (CHAT, chat(kv_transfer_params={"kvlease": {"tenant": "evil"}}), {}),
    "request id": (CHAT, chat(request_id="evil id\t"), {}),
    "data parallel rank": (CHAT, chat(), {"X-data-parallel-rank": "evil"}),
    "priority": (CHAT, chat(), {"X-Vllm-Priority": "evil"}),
    "session": (CHAT, chat(), {"X-Session-ID": "not for engines: evil"}),
    "request id header": (CHAT, chat(), {"X-Request-Id": "evil id"}),
}


@pytest.mark.parametrize("door", DOORS)
async def test_what_is_not_the_client_s_to_say_reaches_no_engine(stack: Stack, door: str) -> None:
    path, body, headers = DOORS[door]

    async with stack.client.post(stack.url + path, json=body, headers=headers) as response:
        await response.read()

    assert response.status == 200
    asked = [request for engine in stack.engines.values() for request in engine.seen]
    assert asked
    for request in asked:
        if door == "session":
            assert "X-Session-ID" not in request.headers
            continue
        assert "evil" not in json.dumps(request.body)
        assert "evil" not in str(request.headers)


async def test_no_header_of_the_client_reaches_an_engine_but_its_credentials(
    stack: Stack,
) -> None:
    headers = {"Authorization": "Bearer engine-key", "Cookie": "a=b", "X-Any": "1"}

    async with stack.client.post(stack.url + CHAT, json=chat(), headers=headers) as response:
        await response.read()

    for engine in stack.engines.values():
        (seen,) = engine.seen
        assert seen.headers["Authorization"] == "Bearer engine-key"
        assert not {"Cookie", "X-Any"} & set(seen.headers)


# --- LoRA adapters ----------------------------------------------------------------------


async def test_a_turn_for_an_adapter_goes_to_engines_that_have_it(stack: Stack) -> None:
    await stack.add("prefill", "prefill-1", other_models=["sql"])
    await stack.add("decode", "decode-1", other_models=["sql"])

    body = chat(conversation_id="c", model="sql")
    async with stack.client.post(stack.url + CHAT, json=body) as response:
        assert response.status == 200
        await response.read()

    for name in ("prefill-1", "decode-1"):
        (seen,) = stack.engines[name].seen
        assert (seen.body["model"], seen.told["model"]) == ("sql", "sql")
    assert not stack.engines["prefill-0"].seen
    assert await stack.metric('kvlease_turns_total{end="ok",model="sql",outcome="miss_no_lease"}')


async def test_adapters_are_listed_below_their_model(stack: Stack) -> None:
    await stack.add("decode", "decode-1", other_models=["sql"])

    async with stack.client.get(stack.url + "/v1/models") as response:
        listed = (await response.json())["data"]
    assert [(item["id"], item["parent"]) for item in listed] == [("sim", None), ("sql", "sim")]
    async with stack.client.get(stack.url + "/v1/models/sql") as response:
        assert (await response.json())["parent"] == "sim"
    # Without a model it is still clear which one is meant.
    async with stack.client.post(stack.url + CHAT, json={"messages": MESSAGES}) as response:
        assert (await response.json())["model"] == "sim"


# --- errors -----------------------------------------------------------------------------


async def test_the_prefill_engine_s_client_error_keeps_its_status_and_body(stack: Stack) -> None:
    fault = Status(404, {"error": {"message": "no such adapter", "code": 404}})
    stack.engines["prefill-0"].faults.append(fault)

    async with stack.client.post(stack.url + CHAT, json=chat(stream=True)) as response:
        answer = await response.json()

    assert (response.status, answer) == (404, fault.body)
    assert stack.engines["decode-0"].seen == []
    assert "x-kvlease-trace-id" in response.headers


async def test_the_decode_engine_s_client_error_keeps_its_status_and_body(stack: Stack) -> None:
    async with stack.client.post(stack.url + CHAT, json=chat(max_tokens=0)) as response:
        answer = await response.json()

    assert response.status == 400
    assert answer["error"]["message"] == "max_tokens must be at least 1, got 0."


@pytest.mark.parametrize(
    ("raw", "status", "word"),
    [
        (b"{", 400, "not valid JSON"),
        (b"[]", 400, "JSON object"),
        (b'{"model": 5}', 400, "model"),
        (b'{"model": "sim", "n": 0}', 400, "n is 0: give a whole number of at least 1"),
        (b'{"model": "sim", "n": "a"}', 400, "n is 'a': give a whole number of at least 1"),
        (b'{"model": "other", "messages": []}', 404, "Known models: sim"),
        (b'{"model": "sim", "conversation_id": 5}', 400, "conversation_id"),
        (b'"' + b"x" * 5000 + b'"', 413, "max_body_bytes"),
    ],
)
async def test_a_request_that_cannot_be_served_is_refused_in_openai_s_shape(
    raw: bytes, status: int, word: str
) -> None:
    async with running(max_body_bytes=4096) as stack:
        await stack.add("prefill", "prefill-0")
        await stack.add("decode", "decode-0")

        async with stack.client.post(stack.url + CHAT, data=raw, headers=JSON) as response:
            answer = await response.json()

        assert response.status == status
        assert word in answer["error"]["message"]
        assert set(answer["error"]) == {"message", "type", "param", "code"}
        assert "x-kvlease-trace-id" in response.headers
        assert all(not engine.seen for engine in stack.engines.values())


@pytest.mark.parametrize("field", [{"max_tokens": 0}, {"prompt_logprobs": 1}])
async def test_of_a_request_that_an_engine_refuses_no_outcome_is_counted(
    stack: Stack, field: dict[str, Any]
) -> None:
    stack.engines["decode-0"].faults.append(Status(400))
    body = chat(conversation_id="c", **field)
    async with stack.client.post(stack.url + CHAT, json=body) as response:
        assert response.status == 400
        await response.read()

    assert "x-kvlease-outcome" not in response.headers
    refused = 'kvlease_turns_total{end="client_error",model="sim",outcome="none"}'
    assert await stack.metric(refused) == 1
    assert "kvlease_turns_total{" not in (await stack.metrics()).replace(refused, "")


async def test_a_request_that_the_router_refuses_is_no_turn(stack: Stack) -> None:
    for fields in ({"n": -1}, {"conversation_id": 5}, {"model": "other"}):
        body = {**chat(conversation_id="c"), **fields}
        async with stack.client.post(stack.url + CHAT, json=body) as response:
            assert response.status in (400, 404)

    async with stack.client.post(stack.url + CHAT, json=chat(conversation_id="c")) as response:
        await response.read()
    assert response.headers["x-kvlease-turn"] == "1"


@pytest.mark.parametrize("said", [None, "application/json; charset=utf-8", "application/x+json"])
async def test_json_is_taken_however_it_is_named(stack: Stack, said: str | None) -> None:
    headers = {} if said is None else {"Content-Type": said}
    async with stack.client.post(
        stack.url + CHAT,
        data=json.dumps(chat()).encode(),
        headers=headers,
        skip_auto_headers=["Content-Type"],
    ) as response:
        assert response.status == 200


@pytest.mark.parametrize("said", ["application/x-www-form-urlencoded", "text/plain"])
async def test_what_is_said_not_to_be_json_is_refused(stack: Stack, said: str) -> None:
    headers = {"Content-Type": said}
    data = json.dumps(chat()).encode()
    async with stack.client.post(stack.url + CHAT, data=data, headers=headers) as response:
        answer = await response.json()
    assert response.status == 415
    assert answer["error"]["message"] == (
        f"The body is said to be {said}: send JSON, with Content-Type: application/json."
    )


async def test_a_wrong_header_of_ours_is_refused_by_name(stack: Stack) -> None:
    headers = {"x-kvlease-retain": "long"}

    async with stack.client.post(stack.url + CHAT, json=chat(), headers=headers) as response:
        answer = await response.json()

    assert (response.status, answer["error"]["param"]) == (400, "x-kvlease-retain")


async def test_a_request_without_a_model_gets_the_only_one(stack: Stack) -> None:
    async with stack.client.post(stack.url + CHAT, json={"messages": MESSAGES}) as response:
        assert response.status == 200

    await stack.add("decode", "other", model="other")
    async with stack.client.post(stack.url + CHAT, json={"messages": MESSAGES}) as response:
        answer = await response.json()
    assert response.status == 400
    assert "name one of other, sim" in answer["error"]["message"]


async def test_without_a_decode_engine_a_turn_is_refused_before_its_prefill() -> None:
    async with running() as stack:
        await stack.add("prefill", "prefill-0")

        async with stack.client.post(stack.url + CHAT, json=chat()) as response:
            answer = await response.json()

        assert response.status == 503
        assert "start a decode engine" in answer["error"]["message"]
        assert stack.engines["prefill-0"].seen == []


async def test_api_keys_name_tenants_and_unknown_ones_are_refused(tmp_path: Any) -> None:
    path = tmp_path / "keys.json"
    path.write_text('{"sk-1": "acme"}')
    async with running(api_keys_file=str(path)) as stack:
        await stack.add("prefill", "prefill-0")
        await stack.add("decode", "decode-0")
        url, body = stack.url + CHAT, chat(conversation_id="c")

        async with stack.client.post(url, json=body) as response:
            answer = await response.json()
            assert (response.status, answer["error"]["code"]) == (401, "invalid_api_key")
        async with stack.client.get(f"{stack.url}/v1/models") as response:
            assert response.status == 401
        headers = {"Authorization": "Bearer sk-1"}
        async with stack.client.post(url, json=body, headers=headers) as response:
            assert response.status == 200

        (seen,) = stack.engines["prefill-0"].seen
        assert seen.told["tenant"] == "acme"
        assert "Authorization" not in seen.headers  # it is the router's key, not the engine's


# --- the other routes -------------------------------------------------------------------


async def test_models_are_the_union_of_those_registered(stack: Stack) -> None:
    await stack.add("decode", "decode-b", model="b")

    async with stack.client.get(f"{stack.url}/v1/models") as response:
        answer = await response.json()
    async with stack.client.get(f"{stack.url}/v1/models/b") as response:
        one = await response.json()

    assert answer["object"] == "list"
    assert [model["id"] for model in answer["data"]] == ["b", "sim"]
    assert one == answer["data"][0]
    assert one["created"] > 1_600_000_000


async def test_ready_needs_engines_of_both_roles_and_health_does_not() -> None:
    async with running() as stack:

        async def get(path: str) -> tuple[int, Any]:
            async with stack.client.get(stack.url + path) as response:
                return response.status, await response.json()

        assert (await get("/health"))[0] == 200
        await until(lambda: _says(get, "No prefill and no decode engine"), "not synced")
        await stack.add("decode", "decode-0")
        status, answer = await get("/ready")
        assert status == 503
        assert answer["error"]["message"] == (
            "No prefill engine is registered: start one. "
            "Until then the decode engine computes whole prompts."
        )
        await stack.add("prefill", "prefill-0")
        assert await get("/ready") == (200, {"status": "ready", "draining": [], "warnings": []})


async def test_what_there_is_is_told_at_the_root_and_a_browser_goes_to_the_page(
    stack: Stack, tmp_path: Any
) -> None:
    async with stack.client.get(stack.url) as response:
        message = (await response.json())["error"]["message"]
    assert response.status == 404
    for path in (CHAT, COMPLETION, "/v1/models", "/ui", "/metrics", "/ready", "/health"):
        assert path in message

    browser = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
    async with stack.client.get(stack.url, headers=browser) as response:
        assert (response.status, response.url.path) == (200, "/ui")
        assert "<title>" in await response.text()

    keys = tmp_path / "keys.json"
    keys.write_text('{"k": "acme"}')
    async with (
        running(api_keys_file=str(keys)) as closed,
        closed.client.get(closed.url, headers=browser) as response,
    ):
        assert response.status == 404  # the page is off


async def _says(get: Any, sentence: str) -> bool:
    status, answer = await get("/ready")
    return status == 503 and sentence in answer["error"]["message"]


async def test_an_unknown_path_is_answered_with_the_known_ones(stack: Stack) -> None:
    async with stack.client.post(f"{stack.url}/v1/responses", json={}) as response:
        answer = await response.json()
    assert response.status == 404
    assert "/v1/chat/completions" in answer["error"]["message"]

    async with stack.client.get(stack.url + CHAT) as response:
        answer = await response.json()
    assert response.status == 405
    assert response.headers["Allow"] == "POST"


async def test_a_conversation_can_be_ended_and_ending_it_again_is_no_error(stack: Stack) -> None:
    async with stack.client.post(stack.url + CHAT, json=chat(conversation_id="a/b")) as response:
        await response.read()
    await stack.grant(stack.engines["decode-0"], "a/b", turn=1)

    answers = []
    for _ in range(2):
        async with stack.client.delete(f"{stack.url}/v1/conversations/a%2Fb") as response:
            assert response.status == 200
            answers.append(await response.json())

    assert answers[0] == {
        "id": "a/b",
        "object": "conversation.deleted",
        "deleted": True,
        "leases_ended": ["sim"],
    }
    assert answers[1]["leases_ended"] == []


# --- configuration ----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["router_listen", "router_grpc_listen"])
async def test_a_port_that_is_taken_is_a_configuration_error(stack: Stack, name: str) -> None:
    free = {"router_listen": "127.0.0.1:0", "router_grpc_listen": "127.0.0.1:0"}
    taken = {name: getattr(stack.settings, name)}
    settings = stack.settings.model_copy(update={**free, **taken})

    with pytest.raises(ConfigError, match=f"cannot listen on {taken[name]}"):
        await serve_router(settings, asyncio.Event())
