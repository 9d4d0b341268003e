"""Who is let in when: the rules by themselves, then the gate on a real event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlease.admission import Gate, Line

LENT_S = 1.0

# The rules


def test_as_many_go_in_as_there_are_places_and_the_others_in_the_order_they_came() -> None:
    line = Line[str](2, LENT_S)
    assert [line.enter(call, 0.0) for call in "abcd"] == [["a"], ["b"], [], []]
    assert line.leave("b", 0.1) == ["c"]
    assert line.leave("a", 0.2) == ["d"]


def test_one_that_leaves_while_it_waits_is_never_let_in() -> None:
    line = Line[str](1, LENT_S)
    for call in "abc":
        line.enter(call, 0.0)
    assert line.leave("b", 0.1) == []
    assert line.leave("a", 0.2) == ["c"]


def test_one_that_hangs_lets_the_next_one_in_when_its_time_is_up() -> None:
    line = Line[str](1, LENT_S)
    line.enter("hangs", 0.0)
    assert line.next_due() is None  # nobody waits
    line.enter("a", 0.5)
    line.enter("b", 0.5)
    assert line.next_due() == LENT_S
    assert line.due(0.9) == []
    assert line.due(1.0) == ["a"]
    assert line.leave("hangs", 1.1) == []  # it did not count any more
    assert line.next_due() == 2.0
    assert line.leave("a", 1.2) == ["b"]
    assert line.next_due() is None


def test_one_that_comes_when_another_ones_time_is_up_does_not_pass_who_waits() -> None:
    line = Line[str](1, LENT_S)
    line.enter("hangs", 0.0)
    line.enter("a", 0.5)
    assert line.enter("b", 1.5) == ["a"]


class Model:
    """Calls as the line must have them: who came, in order, who was let in and when."""

    def __init__(self, places: int) -> None:
        self.line = Line[int](places, LENT_S)
        self.places = places
        self.waiting: list[int] = []
        self.inside: dict[int, float] = {}
        self.now = 0.0
        self.count = 0

    def counted(self) -> int:
        return sum(until > self.now for until in self.inside.values())

    def check(self, admitted: list[int]) -> None:
        assert admitted == self.waiting[: len(admitted)]  # first come, first served
        del self.waiting[: len(admitted)]
        self.inside.update(dict.fromkeys(admitted, self.now + LENT_S))
        assert self.counted() <= self.places
        # Nobody waits without a reason, or without a moment at which it ends.
        assert not self.waiting or self.counted() == self.places
        due = self.line.next_due()
        assert (due is None) == (not self.waiting)
        if due is not None:
            assert due == min(until for until in self.inside.values() if until > self.now)

    def enter(self) -> None:
        self.count += 1
        self.waiting.append(self.count)
        self.check(self.line.enter(self.count, self.now))

    def leave(self, which: int) -> None:
        calls = [*self.waiting, *self.inside]
        if not calls:
            return
        call = calls[which % len(calls)]
        self.inside.pop(call, None)
        if call in self.waiting:
            self.waiting.remove(call)
        self.check(self.line.leave(call, self.now))

    def later(self, seconds: float) -> None:
        self.now += seconds
        self.check(self.line.due(self.now))


STEPS = st.one_of(
    st.just(("enter", 0)),
    st.tuples(st.just("leave"), st.integers(0, 99)),
    st.tuples(st.just("later"), st.sampled_from([0.1, 0.5, 1.0, 3.0])),
)


@given(st.integers(1, 3), st.lists(STEPS, max_size=40))
def test_whatever_comes_places_are_full_before_anybody_waits(
    places: int, steps: list[tuple[str, float]]
) -> None:
    model = Model(places)
    for step, value in steps:
        if step == "enter":
            model.enter()
        elif step == "leave":
            model.leave(int(value))
        else:
            model.later(value)


# The gate


class Work:
    """Calls that go on until they are ended."""

    def __init__(self, gate: Gate) -> None:
        self.begun: list[str] = []
        self._gate = gate
        self._ends: dict[str, asyncio.Event] = {}

    def start(self, name: str) -> asyncio.Task[str]:
        end = self._ends[name] = asyncio.Event()

        async def work() -> str:
            self.begun.append(name)
            await end.wait()
            return f"{name}'s answer"

        return asyncio.create_task(self._gate.through(work))

    def end(self, name: str) -> None:
        self._ends[name].set()


async def settled(condition: Callable[[], bool] = lambda: False, steps: int = 20) -> None:
    """Lets the loop run until ``condition``, or for long enough."""
    for _ in range(steps):
        if condition():
            return
        await asyncio.sleep(0)


async def test_calls_wait_at_the_gate_and_get_their_own_answers() -> None:
    work = Work(Gate(2, lent_s=60))
    tasks = {name: work.start(name) for name in "abcd"}
    await settled()
    assert work.begun == ["a", "b"]
    work.end("b")
    assert await tasks["b"] == "b's answer"
    await settled()
    assert work.begun == ["a", "b", "c"]
    for name in "acd":
        work.end(name)
    assert await asyncio.gather(*tasks.values()) == [f"{name}'s answer" for name in "abcd"]


async def test_a_call_that_fails_gives_its_place_away() -> None:
    gate = Gate(1, lent_s=60)

    async def fails() -> None:
        raise LookupError

    for _ in range(3):
        with pytest.raises(LookupError):
            await gate.through(fails)
    work = Work(gate)
    task = work.start("a")
    work.end("a")
    assert await task == "a's answer"


async def test_a_call_that_is_cancelled_while_it_waits_does_not_begin() -> None:
    work = Work(Gate(1, lent_s=60))
    tasks = {name: work.start(name) for name in "abc"}
    await settled()
    tasks["b"].cancel()
    work.end("a")  # at the same moment: the place is b's until b is told of its end
    await settled()
    assert tasks["b"].cancelled()
    assert work.begun == ["a", "c"]
    work.end("c")
    assert await tasks["c"] == "c's answer"


async def test_a_call_that_is_cancelled_just_when_it_was_let_in_gives_its_place_away() -> None:
    work = Work(Gate(1, lent_s=60))
    tasks = {name: work.start(name) for name in "abc"}
    await settled()
    work.end("a")
    await settled(tasks["a"].done)  # b was let in, and has not run since
    assert work.begun == ["a"]
    tasks["b"].cancel()
    await settled()
    assert tasks["b"].cancelled()
    assert work.begun == ["a", "c"]
    tasks["c"].cancel()
    await asyncio.gather(*tasks.values(), return_exceptions=True)


async def test_a_call_whose_deadline_passes_at_the_gate_leaves_it() -> None:
    work = Work(Gate(1, lent_s=60))
    first = work.start("a")
    await settled()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await work.start("b")
    last = work.start("c")
    work.end("a")
    work.end("c")
    assert await first == "a's answer"
    assert await last == "c's answer"
    assert work.begun == ["a", "c"]


async def test_calls_that_hang_do_not_keep_the_others_out() -> None:
    work = Work(Gate(1, lent_s=0.02))
    hanging = work.start("hangs")
    tasks = [work.start(name) for name in "ab"]
    work.end("b")
    assert await asyncio.wait_for(tasks[1], 5) == "b's answer"  # a hangs too
    assert work.begun == ["hangs", "a", "b"]
    for task in (hanging, tasks[0]):
        task.cancel()
    await asyncio.gather(hanging, *tasks, return_exceptions=True)
