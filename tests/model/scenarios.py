"""Stories that once went wrong, or would if one rule were missing. Each holds with the real
rules; for each rule that is broken on purpose (test_mutations.py), one of them fails."""

from __future__ import annotations

from sim_script import (
    Crash,
    End,
    Event,
    Pause,
    Renew,
    Step,
    StorePause,
    Turn,
    Wait,
    Weather,
)
from sim_world import Setup

ONE = Setup(decoders=1)
TWO = Setup(decoders=2)

# Places, in the order of World.places(), with two lease replicas.
LEASE_0, LEASE_1, REGISTRY, DECODE_0, DECODE_1 = range(5)

SCENARIOS: dict[str, tuple[Setup, list[Step]]] = {
    "turns follow each other": (
        ONE,
        [Turn(), Wait(1.0), Turn(), Wait(1.0), Event("expect_hit"), Turn(), Wait(1.0)],
    ),
    "a turn is granted while the one before is read": (
        ONE,
        [Turn(), Wait(1.0), Turn(room_s=20.0), Wait(1.0), Turn(), Wait(25.0)],
    ),
    "an older turn ends after a later one": (
        ONE,
        [Turn(), Wait(1.0), Turn(think_s=10.0), Wait(0.5), Turn(), Wait(15.0)],
    ),
    "many readers ask at once": (
        ONE,
        [Turn(), Wait(1.0), *[Turn(room_s=5.0)] * 4, Wait(10.0)],
    ),
    "a conversation ends": (
        ONE,
        [Turn(), Wait(1.0), End(), Wait(1.0), Event("expect_free")],
    ),
    "a conversation ends while it is read": (
        ONE,
        [Turn(), Wait(1.0), Turn(room_s=5.0), Wait(0.5), End(), Wait(6.5), Event("expect_free")],
    ),
    "a conversation ends, and its reader never says that it is done": (
        ONE,
        [
            *(Turn(), Wait(1.0), Weather("prefill", "lease", "deaf"), Turn(), Wait(0.5), End()),
            *(Wait(32.0), Event("expect_free")),
        ],
    ),
    "a history is edited": (
        ONE,
        [Turn(new=25), Wait(1.0), Turn(forget=12), Wait(1.0), Event("expect_hit")],
    ),
    "a history loses its last words": (
        ONE,
        [Turn(), Wait(1.0), Turn(forget=3), Wait(1.0)],
    ),
    "a turn has another cache salt": (
        ONE,
        [Turn(new=25), Wait(1.0), Turn(salt="x"), Wait(1.0)],
    ),
    "two tenants say the same": (
        ONE,
        [Turn(0), Turn(1), Wait(1.0), Turn(0), Turn(1), Wait(1.0), Event("expect_hit")],
    ),
    "a tool takes longer than the retention": (
        ONE,
        [
            *(Turn(), Wait(80.0), Renew(seconds=110.0), Wait(60.0), Turn(), Wait(1.0)),
            Event("expect_hit"),
        ],
    ),
    "a retention is cut short": (
        ONE,
        [Turn(), Wait(5.0), Renew(seconds=10.0), Wait(11.0), Event("expect_free")],
    ),
    "a retention is renewed that the holder cannot hear of": (
        ONE,
        [
            *(Turn(), Wait(1.0), Weather("decode-0", "lease", "cut"), Renew(seconds=120.0)),
            *(Wait(119.5), Turn(room_s=3.0), Wait(5.0), Turn(), Wait(40.0)),
        ],
    ),
    "the lease service is out of reach until the retention is over": (
        ONE,
        [Turn(), Wait(1.0), Weather("decode", "lease", "cut"), Wait(130.0)],
    ),
    "more is said than fits the budget": (
        Setup(decoders=1, num_blocks=30),
        [
            *(Turn(new=20), Wait(1.0), Turn(1, new=20), Wait(1.0), Turn(2, new=20)),
            Wait(61.0),
        ],
    ),
    "a replica's clock is ahead of the one that opened a ticket": (
        Setup(decoders=1, skews=(20.0, -20.0)),
        [Turn(), Wait(1.0), *[Turn(room_s=25.0)] * 4, Wait(40.0)],
    ),
    "a replica's clock is behind when the retention is over": (
        Setup(decoders=1, skews=(20.0, -20.0)),
        [
            *(Crash(LEASE_1, 3.0), Turn(), Wait(6.0), Crash(LEASE_0, 150.0)),
            *(Weather("decode-0", "lease", "cut"), Wait(95.0), Turn(room_s=25.0)),
            *(Turn(room_s=25.0), Turn(room_s=25.0), Wait(40.0)),
        ],
    ),
    "a grant comes twice, the second time after its lease has ended": (
        ONE,
        [Weather("decode", "lease", "echo"), Turn(retain_s=20.0), Wait(70.0)],
    ),
    "a grant comes after its holder has given it up": (
        ONE,
        [
            *(Weather("decode", "lease", "stuck"), Turn(), Wait(7.5)),
            *(Weather("decode", "lease", "good"), Wait(40.0)),
        ],
    ),
    "answers to renewals are lost": (
        ONE,
        [
            *(Turn(), Wait(1.0), Weather("decode", "registry", "deaf"), Wait(14.4)),
            *(Weather("decode", "registry", "cut"), Weather("prefill", "lease", "deaf")),
            *(Wait(9.0), Turn(), Wait(40.0)),
        ],
    ),
    "a session runs out while its lease is read": (
        ONE,
        [
            *(Turn(), Wait(3.0), Weather("decode", "registry", "cut"), Wait(0.9), Turn(1)),
            *(Wait(10.1), Turn(room_s=25.0), Wait(40.0)),
        ],
    ),
    "an engine is cut off while its lease is read": (
        ONE,
        [
            *(Turn(), Wait(1.0), Weather("decode", "", "cut"), Wait(10.0)),
            *(Weather("prefill", "lease", "deaf"), Turn(), Wait(60.0)),
        ],
    ),
    "the store elects a leader while a holder is cut off": (
        ONE,
        [
            *(Turn(), Wait(1.0), Weather("decode-0", "registry", "cut")),
            *(Weather("decode-0", "lease", "cut"), Wait(14.2), Event("elect_leader"), Wait(14.6)),
            *(Turn(room_s=27.8, read_s=1.9), Wait(40.0)),
        ],
    ),
    "the store is restarted long after a holder was cut off": (
        ONE,
        [
            *(Turn(), Wait(1.0), Weather("decode-0", "registry", "cut")),
            *(Weather("decode-0", "lease", "cut"), StorePause(70.0, restart=True), Wait(71.0)),
            *(Turn(), Wait(40.0)),
        ],
    ),
    "a holder is paused for longer than its session": (
        ONE,
        [
            *(Turn(), Wait(1.0), Turn(room_s=10.0), Wait(0.5), Pause(DECODE_0, 60.0)),
            *(Wait(12.0), Turn(), Wait(55.0), Turn(), Wait(2.0)),
        ],
    ),
    "an engine comes back as another incarnation": (
        TWO,
        [
            *(Turn(), Wait(1.0), Turn(room_s=5.0), Wait(0.5), Crash(DECODE_0, 2.0)),
            *(Wait(10.0), Turn(), Wait(1.0), Turn(), Wait(1.0), Event("expect_hit")),
        ],
    ),
    "a successor is lost while its predecessor is read": (
        TWO,
        [
            *(Turn(decoder=0), Wait(1.0), Turn(decoder=0, room_s=27.0), Wait(0.5)),
            *(Weather("decode-0", "lease", "cut"), Turn(decoder=1), Wait(0.8)),
            *(Crash(DECODE_1, 60.0), Wait(16.5), Weather("decode-0", "lease", "good")),
            *(Turn(decoder=0), Wait(20.0)),
        ],
    ),
    "a watch misses what a lost successor knew": (
        TWO,
        [
            *(Turn(decoder=0), Wait(1.0), Weather("store", "lease", "cut")),
            *(Weather("prefill", "lease", "deaf"), Turn(decoder=1), Wait(0.8)),
            *(Crash(DECODE_1, 60.0), Wait(17.0), Weather("store", "lease", "good"), Wait(20.0)),
        ],
    ),
    "a watch is behind what an answer has told": (
        ONE,
        [
            *(Turn(retain_s=20.0), Wait(18.0), Weather("store", "lease", "late")),
            *(Turn(end=True), Wait(0.6), Turn(end=True, room_s=8.0), Wait(30.0)),
        ],
    ),
    "answers are slow, and reads end as late as they may": (
        ONE,
        [
            *(Turn(), Wait(1.0), Weather("prefill", "decode", "slow")),
            *[Turn(room_s=room_s, read_s=1.99) for room_s in (26.6, 27.0, 27.3, 27.6)],
            *(Wait(0.8), End(), Wait(35.0)),
        ],
    ),
    "replicas die at each step": (
        TWO,
        [
            *(Turn(), Wait(0.3), Crash(LEASE_0, 3.0), Wait(0.01), Turn(), Wait(0.2)),
            *(Crash(LEASE_1, 3.0), Wait(0.05), Turn(), Wait(4.0), Turn(), Wait(1.0)),
            *(Turn(), Wait(1.0), Event("expect_hit")),
        ],
    ),
}
