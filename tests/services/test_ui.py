"""The page /ui, in a real browser, on real services with simulated engines."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from axe_playwright_python.async_playwright import Axe
from browser import running_browser
from playwright.async_api import Browser, Page, expect
from router_stack import Stack, running, running_pair, until

from kvlease import times
from kvlease.v1 import common_pb2, lease_pb2, lease_pb2_grpc, registry_pb2, registry_pb2_grpc
from kvlease.v1.lease_pb2 import TurnRecord

# One browser for all tests: it takes seconds to start. So they share an event loop.
pytestmark = pytest.mark.asyncio(loop_scope="module")

PHONE, DESKTOP = {"width": 360, "height": 740}, {"width": 1280, "height": 900}
# Other tests may keep the machine busy.
expect.set_options(timeout=20_000)

EVIL = "<script>window.pwned=1</script><img src=x onerror=window.pwned=1>"


@pytest_asyncio.fixture(loop_scope="module")
async def stack() -> AsyncIterator[Stack]:
    async with running_pair(jaeger_url="http://jaeger.example:16686/", session_ttl=15) as made:
        yield made


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def browser() -> AsyncIterator[Browser]:
    async with running_browser() as made:
        yield made


@pytest_asyncio.fixture(loop_scope="module")
async def page(stack: Stack, browser: Browser) -> AsyncIterator[Page]:
    """The page, open; at the end it must have said nothing to the console."""
    opened = await browser.new_page(viewport=DESKTOP)
    said: list[str] = []
    opened.on("console", lambda message: said.append(message.text))
    opened.on("pageerror", lambda error: said.append(str(error)))
    opened.on("request", lambda request: asked.append(request.url))
    asked: list[str] = []
    await opened.goto(f"{stack.url}/ui")
    yield opened
    await opened.close()
    assert [text for text in said if "ERR_CONNECTION_REFUSED" not in text] == []
    assert [url for url in asked if not url.startswith((stack.url, "data:"))] == []


def turn(number: int, **fields: Any) -> TurnRecord:
    values: dict[str, Any] = {
        "turn": number,
        "start_time": times.timestamp(times.wall_clock()),
        "outcome": common_pb2.OUTCOME_HIT,
        "detail": "2,016 of 2,016 kept tokens are proven equal",
        "end": lease_pb2.TURN_END_OK,
        "prompt_tokens": 3000,
        "reused_tokens": 2016,
        "computed_tokens": 984,
        "ttft": times.duration(0.4 / number),
        "trace_id": f"{number:032x}",
    }
    return TurnRecord(**{**values, **fields})


async def record(stack: Stack, names: Sequence[str], *turns: TurnRecord) -> None:
    entries = [
        lease_pb2.RecordTurnsRequest.Entry(
            conversation=common_pb2.Conversation(
                tenant="default", model="sim", conversation_id=name
            ),
            turn=each,
        )
        for name in names
        for each in turns
    ]
    stub = lease_pb2_grpc.LeaseServiceStub(stack.lease_channel)
    for start in range(0, len(entries), 64):
        request = lease_pb2.RecordTurnsRequest(entries=entries[start : start + 64])
        await stub.RecordTurns(request, timeout=10)


async def use_blocks(stack: Stack, retained: int) -> None:
    engine = stack.engines["decode-0"]
    request = registry_pb2.KeepAliveRequest(
        session_id=engine.session_id,
        role=registry_pb2.ENGINE_ROLE_DECODE,
        engine_id=engine.engine_id,
        incarnation=engine.incarnation,
        usage=registry_pb2.BlockUsage(
            total_blocks=4096,
            free_blocks=3000,
            retained_blocks=retained,
            retained_leases=2,
            retention_budget_blocks=2048,
        ),
    )
    await registry_pb2_grpc.RegistryStub(stack.registry_channel).KeepAlive(request, timeout=5)


async def state(stack: Stack, **query: str) -> dict[str, Any]:
    async with stack.client.get(f"{stack.url}/ui/state", params=query) as response:
        assert response.status == 200
        found: dict[str, Any] = await response.json()
        return found


def row(page: Page, name: str) -> Any:
    """The engine's or the conversation's."""
    header = page.get_by_role("rowheader").filter(has_text=name)
    return page.get_by_role("row").filter(has=header)


async def test_it_shows_engines_and_conversations_and_follows_them(
    stack: Stack, page: Page
) -> None:
    await expect(row(page, "decode-0")).to_contain_text("serving")
    await expect(page.get_by_text("No conversation yet.")).to_be_visible()
    await use_blocks(stack, 190)
    await record(stack, ["books-42"], turn(1, outcome=common_pb2.OUTCOME_MISS_NO_LEASE), turn(2))
    await stack.grant(stack.engines["decode-0"], "books-42", 2)

    engine, talk = row(page, "decode-0"), row(page, "books-42")
    await expect(engine).to_contain_text("190 of 2,048")
    await expect(engine.locator("meter")).to_have_attribute("value", "190")
    await expect(talk.get_by_role("rowheader")).to_contain_text("books-42")
    await expect(talk).to_contain_text("2,016 of 3,000")
    await expect(talk).to_contain_text("2,016 kept tokens are proven equal")
    await expect(talk).to_contain_text("8 min left, 256 tokens")
    spark = talk.get_by_role("img")
    await expect(spark).to_have_attribute(
        "aria-label", "Time to first token: turn 1 400 ms; turn 2 200 ms, hit"
    )
    assert await spark.locator("rect").count() == 2

    await record(stack, ["books-42"], turn(3, outcome=common_pb2.OUTCOME_MISS_PREFIX))
    await expect(talk).to_contain_text("miss_prefix")
    assert await talk.count() == 1
    link = talk.get_by_role("link", name="trace of turn 3 of books-42")
    await expect(link).to_have_attribute("href", f"http://jaeger.example:16686/trace/{3:032x}")


async def test_an_id_is_text_whatever_is_in_it(stack: Stack, page: Page) -> None:
    await record(stack, [EVIL], turn(1, detail=EVIL))
    cell = page.locator("#conversations tbody").get_by_role("rowheader")
    await expect(cell).to_contain_text(EVIL)
    assert await page.evaluate("window.pwned") is None
    assert await page.locator("#conversations script, #conversations img").count() == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [PHONE, DESKTOP], ids=["phone", "desktop"])
async def test_it_is_accessible_and_fits(stack: Stack, page: Page, size: Any, scheme: Any) -> None:
    await page.set_viewport_size(size)
    await page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
    await use_blocks(stack, 190)
    await record(stack, ["books-42", "x" * 512, "films-7"], turn(1), turn(2))
    await record(stack, ["films-8"], turn(1, outcome=0, end=lease_pb2.TURN_END_FAILED, ttft=None))
    await stack.grant(stack.engines["decode-0"], "books-42", 2)
    await expect(row(page, "books-42")).to_contain_text("decode-0")

    found = await Axe().run(page)

    assert found.violations_count == 0, found.generate_report()
    wide = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert await page.evaluate(wide) == 0
    # Cards keep their table's meaning.
    assert await page.get_by_role("table").count() == 2
    assert await page.get_by_role("rowheader").count() == 6
    moving = "document.getAnimations().length"
    assert await page.evaluate(moving) == 0


async def test_it_is_worked_by_keyboard_and_focus_stays(stack: Stack, page: Page) -> None:
    await record(stack, ["books-42"], turn(1))
    await expect(row(page, "books-42")).to_be_visible()
    focused = []
    for _ in range(3):
        await page.keyboard.press("Tab")
        focused.append(
            await page.evaluate(
                "[document.activeElement.id || document.activeElement.textContent,"
                " getComputedStyle(document.activeElement).outlineStyle]"
            )
        )
    assert focused == [["pause", "solid"], ["filter", "solid"], ["trace", "solid"]]

    await record(stack, ["films-7"], turn(1))
    await record(stack, ["books-42"], turn(2))
    await expect(row(page, "films-7")).to_be_visible()
    link = page.get_by_role("link", name="trace of turn 2 of books-42")
    await expect(link).to_be_focused()


async def test_the_filter_finds_what_is_not_shown(stack: Stack, page: Page) -> None:
    await record(stack, [f"talk-{number:03}" for number in range(150)], turn(1))
    count = page.locator("#count")
    await expect(count).to_have_text("150 conversations: the latest 100 are shown, 50 are not.")
    await expect(page.locator("#conversations tbody tr")).to_have_count(100)
    await page.get_by_label("Find conversations").fill("talk-007")
    await expect(page.locator("#conversations tbody tr")).to_have_count(1)
    await expect(page.get_by_role("status")).to_have_text(
        "1 conversation with “talk-007” in the id."
    )
    await page.get_by_label("Find conversations").fill("no such")
    await expect(page.get_by_text("None found.")).to_be_visible()


async def test_only_what_matters_is_read_out(stack: Stack, page: Page) -> None:
    await record(stack, ["books-42"], turn(1))
    await expect(row(page, "books-42")).to_be_visible()
    await expect(page.get_by_role("status")).to_have_text("")
    request = registry_pb2.DrainRequest(role=registry_pb2.ENGINE_ROLE_DECODE, engine_id="decode-0")
    await registry_pb2_grpc.RegistryStub(stack.registry_channel).Drain(request, timeout=5)
    await expect(page.get_by_role("status")).to_have_text("decode-0 is draining")
    await expect(page.get_by_role("alert")).to_contain_text("are draining (decode-0)")


async def test_it_can_be_stopped(stack: Stack, page: Page) -> None:
    await record(stack, ["books-42"], turn(1))
    await expect(row(page, "books-42")).to_be_visible()
    await page.get_by_role("button", name="Pause").click()
    await expect(page.get_by_text("Paused.")).to_be_visible()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    await page.wait_for_timeout(2500)
    assert asked == []
    await page.get_by_role("button", name="Pause").click()
    await expect(page.get_by_text("As of")).to_be_visible()


async def test_what_was_there_stays_while_the_lease_service_is_away(
    stack: Stack, page: Page
) -> None:
    await record(stack, ["books-42"], turn(1))
    await expect(row(page, "books-42")).to_be_visible()
    await stack.lease.stop()
    await expect(page.get_by_role("alert")).to_contain_text("The lease service at")
    await expect(row(page, "books-42")).to_be_visible()
    await stack.start("lease")
    await expect(page.get_by_role("alert")).to_be_hidden()


async def test_it_says_when_the_router_has_gone_and_goes_on_when_it_is_back(
    stack: Stack, page: Page
) -> None:
    await expect(row(page, "decode-0")).to_be_visible()
    await stack.router.stop()
    await expect(page.get_by_role("alert")).to_contain_text("The router does not answer")
    await stack.start("router")
    await expect(page.get_by_role("alert")).to_be_hidden(timeout=10_000)
    await expect(row(page, "decode-0")).to_be_visible()


@pytest.mark.parametrize(
    ("end", "words"),
    [
        (lease_pb2.TURN_END_CLIENT_ERROR, "the request was refused"),
        (lease_pb2.TURN_END_FAILED, "the turn failed"),
        (lease_pb2.TURN_END_DISCONNECTED, "the client went away"),
        (lease_pb2.TURN_END_OK, "the answer was empty"),
    ],
)
async def test_a_turn_without_a_first_token_is_told_as_what_it_was(
    stack: Stack, page: Page, end: lease_pb2.TurnEnd.ValueType, words: str
) -> None:
    none = turn(1, outcome=common_pb2.OUTCOME_UNSPECIFIED, end=end)
    none.ClearField("ttft")
    await record(stack, ["books-1"], none)

    await expect(row(page, "books-1")).to_contain_text(words)
    await expect(row(page, "books-1")).not_to_contain_text("no answer yet")


async def test_a_problem_is_told_by_the_rule_that_turns_go_by(stack: Stack, page: Page) -> None:
    await expect(row(page, "decode-0")).to_contain_text("serving")
    await stack.engines["decode-0"].kill()

    await expect(page.get_by_role("alert")).to_contain_text("accepted by decode-0")
    await expect(row(page, "decode-0")).to_contain_text("suspect")


# Without a browser


async def test_its_state_tells_of_a_lease_service_that_is_away(stack: Stack) -> None:
    await stack.lease.stop()
    found = await state(stack)
    assert found["problem"].startswith("The lease service at")
    assert found["conversations"] is None  # which is not the same as none
    assert [engine["id"] for engine in found["engines"]] == ["decode-0", "prefill-0"]
    await stack.start("lease")


async def test_its_files_allow_nothing_from_elsewhere(stack: Stack) -> None:
    for path, kind in (
        ("", "text/html"),
        ("/", "text/html"),
        ("/ui.js", "text/javascript"),
        ("/ui.css", "text/css"),
    ):
        async with stack.client.get(f"{stack.url}/ui{path}") as response:
            assert (response.status, response.content_type) == (200, kind)
            policy = response.headers["Content-Security-Policy"]
            assert policy.startswith("default-src 'none'; script-src 'self'; ")
            assert "unsafe" not in policy
            assert response.headers["X-Content-Type-Options"] == "nosniff"


@pytest.mark.parametrize(
    ("setting", "keys", "status"),
    [
        ("auto", False, 200),
        ("auto", True, 404),
        ("on", True, 200),
        ("off", False, 404),
    ],
)
async def test_it_is_off_where_tenants_have_keys_unless_it_is_wanted(
    tmp_path: Path, setting: str, keys: bool, status: int
) -> None:
    file = tmp_path / "keys.json"
    file.write_text(json.dumps({"secret": "acme"}))
    given = {"ui": setting, **({"api_keys_file": str(file)} if keys else {})}
    async with running(**given) as stack:
        for path in ("/ui", "/ui/state", "/ui/ui.js"):
            async with stack.client.get(stack.url + path) as response:
                assert response.status == status
                if status == 404:
                    assert "set ui=on" in (await response.json())["error"]["message"]


async def test_a_client_that_goes_on_asking_gets_the_latest(stack: Stack) -> None:
    for number in range(1, 4):
        await record(stack, ["books-42"], turn(number))
        await until(lambda number=number: _shows(stack, number), f"turn {number} was not shown")


async def _shows(stack: Stack, number: int) -> bool:
    found = await state(stack, filter="BOOKS")
    return [each["turn"] for each in found["conversations"]] == [number]
