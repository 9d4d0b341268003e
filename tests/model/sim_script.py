"""What a simulation goes through, as data: so that it can be chosen by chance, shrunk to
what matters, and written down."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st
from sim_world import WEATHERS, Setup, World


@dataclass(frozen=True, slots=True)
class Wait:
    """Time passes."""

    seconds: float

    def play(self, world: World) -> None:
        world.run_for(self.seconds)


@dataclass(frozen=True, slots=True)
class Turn:
    """A client sends a turn; the fields are those of :meth:`sim_world.World.turn`."""

    who: int = 0
    new: int = 9
    forget: int = 0
    decoder: int = -1
    prefiller: int = 0
    salt: str = ""
    think_s: float = 0.2
    room_s: float = 0.0
    read_s: float = 0.03
    retain_s: float | None = None
    end: bool = False
    aborted: bool = False

    def play(self, world: World) -> None:
        world.turn(
            self.who,
            new=self.new,
            forget=self.forget,
            decoder=self.decoder,
            prefiller=self.prefiller,
            salt=self.salt,
            think_s=self.think_s,
            room_s=self.room_s,
            read_s=self.read_s,
            retain_s=self.retain_s,
            end=self.end,
            aborted=self.aborted,
        )


@dataclass(frozen=True, slots=True)
class End:
    """A client ends a conversation."""

    who: int = 0

    def play(self, world: World) -> None:
        world.end(self.who)


@dataclass(frozen=True, slots=True)
class Renew:
    """A client asks for another retention."""

    who: int = 0
    seconds: float = 110.0

    def play(self, world: World) -> None:
        world.renew(self.who, self.seconds)


@dataclass(frozen=True, slots=True)
class Weather:
    """Links between processes whose names start so get better or worse."""

    sources: str
    targets: str
    kind: str

    def play(self, world: World) -> None:
        world.weather(self.sources, self.targets, self.kind)


@dataclass(frozen=True, slots=True)
class Pause:
    """A process stops for a while."""

    place: int
    seconds: float

    def play(self, world: World) -> None:
        world.pause(self.place, self.seconds)


@dataclass(frozen=True, slots=True)
class Crash:
    """A process is killed, and started again later."""

    place: int
    seconds: float

    def play(self, world: World) -> None:
        world.crash(self.place, self.seconds)


@dataclass(frozen=True, slots=True)
class StorePause:
    """The store stops for a while, or is restarted."""

    seconds: float
    restart: bool = False

    def play(self, world: World) -> None:
        world.pause_store(self.seconds, restart=self.restart)


@dataclass(frozen=True, slots=True)
class Event:
    """elect_leader, lose_history, break_watches, heal, expect_hit or expect_free."""

    name: str

    def play(self, world: World) -> None:
        getattr(world, self.name)()


Step = Wait | Turn | End | Renew | Weather | Pause | Crash | StorePause | Event


def play(setup: Setup, steps: list[Step]) -> World:
    """Goes through the steps, then ends all faults and looks whether everything recovers.

    Raises AssertionError if a rule that always holds was broken. The world is closed.
    """
    world = World(setup)
    try:
        world.run_for(1.0)
        for step in steps:
            world.oracle.tell(f"--- {step}")
            step.play(world)
            world.check()
        world.oracle.tell("--- heal")
        world.heal()
        world.settle()
        world.hits_again()
    except AssertionError as error:
        error.add_note("\n".join(world.oracle.told))
        raise
    finally:
        world.close()
    return world


def setups() -> st.SearchStrategy[Setup]:
    return st.builds(
        Setup,
        seed=st.integers(0, 2**16),
        skews=st.sampled_from(
            [
                (0.0, 0.0),
                (20.0, -20.0),
                (-20.0, 20.0),
                (0.0, 7.0, -13.0),
                (0.0,),
                (20.0, -20.0, 0.0),
            ]
        ),
        decoders=st.integers(1, 2),
        prefillers=st.integers(1, 2),
        num_blocks=st.sampled_from([60, 200, 30]),
    )


_WHO = st.sampled_from([0, 0, 0, 1, 2])


def _turns() -> st.SearchStrategy[Step]:
    return st.builds(
        Turn,
        who=_WHO,
        new=st.sampled_from([9, 4, 25]),
        forget=st.sampled_from([0, 0, 0, 3, 8]),
        decoder=st.sampled_from([-1, -1, 0, 1]),
        prefiller=st.integers(0, 1),
        salt=st.sampled_from(["", "", "", "x"]),
        think_s=st.sampled_from([0.2, 0.01, 2.0, 10.0]),
        room_s=st.sampled_from([0.0, 0.0, 1.0, 8.0, 25.0]),
        read_s=st.sampled_from([0.03, 0.5, 1.9, 3.0]),
        retain_s=st.sampled_from([None, None, None, 20.0, 120.0]),
        end=st.sampled_from([False, False, False, False, True]),
        aborted=st.sampled_from([False, False, False, False, True]),
    )


def _weathers() -> st.SearchStrategy[Step]:
    ends = st.sampled_from(
        [
            ("decode", "lease"),
            ("decode", "registry"),
            ("decode-0", ""),
            ("prefill", "lease"),
            ("lease", "store"),
            ("lease-0", "store"),
            ("lease-1", "store"),
            ("registry", "store"),
            ("router", "lease"),
            ("decode", "lease-0"),
            ("prefill", "decode"),
        ]
    )
    kinds = st.sampled_from(sorted(WEATHERS))
    return st.builds(lambda ends, kind: Weather(ends[0], ends[1], kind), ends, kinds)


_FAULT_S = st.sampled_from([2.0, 0.5, 7.0, 14.0, 20.0, 50.0])


def _faults() -> list[st.SearchStrategy[Step]]:
    place = st.integers(0, 6)
    events = ["elect_leader", "lose_history", "break_watches", "heal"]
    return [
        _weathers(),
        st.builds(Pause, place, _FAULT_S),
        st.builds(Crash, place, _FAULT_S),
        st.builds(StorePause, _FAULT_S, st.booleans()),
        st.builds(Event, st.sampled_from(events)),
        st.builds(End, _WHO),
        st.builds(Renew, _WHO, st.sampled_from([110.0, 20.0, 60.0])),
    ]


def scripts() -> st.SearchStrategy[list[Step]]:
    """Turns, waits, and some kinds of trouble: a script with few kinds has more of each."""
    waits = st.builds(Wait, st.sampled_from([0.3, 0.005, 0.02, 1.0, 3.0, 9.0, 16.0, 31.0, 60.0]))
    often = [waits, _turns(), waits, _turns()]
    begin: list[Step] = [Turn(), Wait(1.0)]
    kinds = st.lists(st.sampled_from(range(7)), min_size=1, max_size=3)

    def of(chosen: list[int]) -> st.SearchStrategy[list[Step]]:
        faults = _faults()
        step = st.one_of(*often, *(faults[kind] for kind in chosen))
        return st.lists(step, min_size=6, max_size=50).map(lambda steps: begin + steps)

    return kinds.flatmap(of)
