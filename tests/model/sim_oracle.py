"""Knows the truth of a simulation, and whether a rule that always holds was broken.

It looks from outside: at what the store holds, at what blocks hold, and at what readers do.
It uses true time and none of the rules that it judges.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sim_blocks import Block, Text
from sim_decode import DecodeJob, DecodeRun
from sim_loop import SimLoop
from sim_prefill import PrefillJob, PrefillRun, Reader
from sim_services import EPOCH

from kvlease import times
from kvlease.config import Settings
from kvlease.lease import keys
from kvlease.store.base import Versioned
from kvlease.v1 import common_pb2, lease_pb2
from kvlease.v1.lease_pb2 import Lease
from kvlease_connector.claims import Answer, Ask

if TYPE_CHECKING:
    from sim_store import StoreCore

SLACK_S = 8.0
"""A grant may be tried for 5 s, and its last try may take 2."""
MAX_SKEW_S = 20.0
OVER_S = 45.0
"""A budget may be exceeded by one turn, until what it supersedes is free: a reader may have
just begun, and takes at most the grace."""


@dataclass(eq=False, slots=True)
class Kept:
    """Blocks that a decode engine keeps after a turn."""

    run: DecodeRun
    job: DecodeJob
    blocks: list[Block]
    held_at: float
    lease_id: str = ""
    session_id: str = ""
    released_at: float = math.inf
    may_free_at: float = math.inf
    """From here on the retention is over by the holder's own clock, whatever the store says."""
    free_by: float = math.inf
    """No block is kept longer."""


@dataclass(eq=False, slots=True)
class Opened:
    """A ticket in the store."""

    lease_id: str
    at: float
    promised: bool
    """Whether the holder's session had been promised to last until then."""
    closed: bool = False


@dataclass(slots=True)
class Oracle:
    """``broken`` says which rules were broken, and how."""

    loop: SimLoop
    settings: Settings
    broken: list[str] = field(default_factory=list)
    told: list[str] = field(default_factory=list)
    """What happened, for people."""
    kept: dict[str, Kept] = field(default_factory=dict)
    readers: list[Reader] = field(default_factory=list)
    tickets: dict[str, Opened] = field(default_factory=dict)
    ended: set[str] = field(default_factory=set)
    hits: int = 0
    reads: int = 0
    _by_lease: dict[str, Kept] = field(default_factory=dict)
    _registered: dict[str, DecodeRun] = field(default_factory=dict)
    _finishing: DecodeJob | None = None
    _over_since: dict[DecodeRun, float] = field(default_factory=dict)
    core: StoreCore | None = None

    def tell(self, what: str) -> None:
        self.told.append(f"{self.loop.now - 1000.0:9.3f} {what}")

    def breaks(self, rule: str, what: str) -> None:
        self.tell(f"BROKEN {rule}: {what}")
        self.broken.append(f"{rule}: {what}")
        if self.loop.is_running():
            self.loop.stop()

    # --- what the store is told ---------------------------------------------------------

    def observe(self, key: str, before: Versioned | None, after: Versioned | None) -> None:
        """One write to the store."""
        if not key.startswith(keys.LEASES) or "\x7f" in key:
            return
        old = Lease.FromString(before.value) if before else None
        new = Lease.FromString(after.value) if after else None
        if new is not None:
            self._stored(old, new)
        if old is not None:
            if new is None or new.lease_id != old.lease_id:
                self.ended.add(old.lease_id)
            assert self.core is not None
            if new is not None or old.holder_session_id != self.core.ending:
                self._keeps_tickets(old, new)
        self.tell(f"store {key}: {_words(old)} -> {_words(new)}")

    def _stored(self, old: Lease | None, new: Lease) -> None:
        request_id = json.loads(new.kv_transfer_params_json)["remote_request_id"]
        kept = self._by_lease[new.lease_id] = self.kept[request_id]
        kept.lease_id, kept.session_id = new.lease_id, new.holder_session_id
        is_new = old is None or old.lease_id != new.lease_id
        if new.state == lease_pb2.LEASE_STATE_HELD:
            if new.lease_id in self.ended:
                self.breaks("an ended lease does not come back", new.lease_id)
            if old is not None and is_new and 0 < new.turn < old.turn:
                self.breaks("turns never go back", f"{old.turn} -> {new.turn}")
            if is_new and kept.released_at < math.inf:
                self.breaks("a lease is stored only while its blocks are kept", request_id)
        else:
            self.ended.add(new.lease_id)
        if old is not None and not is_new and old.expire_time != new.expire_time:
            self._renewed(kept, new)
        for ticket in new.tickets:
            if ticket.ticket_id not in self.tickets:
                host, session = kept.run.host, kept.run.session
                lasts = host.clock() <= session.last_attempt + self.settings.session_ttl
                promised = lasts and session.session_id in (None, new.holder_session_id)
                opened = Opened(new.lease_id, self.loop.now, promised)
                self.tickets[ticket.ticket_id] = opened
                self._may_open(old, new, kept)

    def _renewed(self, kept: Kept, new: Lease) -> None:
        until = times.moment(new.expire_time) - EPOCH
        grace_s = self.settings.claim_grace
        kept.may_free_at = min(kept.may_free_at, until - MAX_SKEW_S + grace_s)
        kept.free_by = max(kept.free_by, until + MAX_SKEW_S + grace_s + SLACK_S)

    def _may_open(self, old: Lease | None, new: Lease, kept: Kept) -> None:
        if old is None or old.lease_id != new.lease_id or old.lease_id in self.ended:
            self.breaks("only a held lease opens tickets", new.lease_id)
        current = self._registered.get(kept.run.host.name)
        if current is not kept.run:
            self.breaks("a handle of an earlier incarnation is never used", new.lease_id)

    def _keeps_tickets(self, old: Lease, new: Lease | None) -> None:
        """An open ticket stays in the record, whatever becomes of its lease."""
        left = {t.ticket_id for t in new.tickets} if new else set()
        if new is not None:
            left |= {t.ticket_id for item in new.retiring for t in item.tickets}
        for ticket in [*old.tickets, *(t for item in old.retiring for t in item.tickets)]:
            if ticket.ticket_id not in left and self._is_open(ticket.ticket_id):
                self.breaks("an open ticket is not forgotten", ticket.ticket_id)

    def _is_open(self, ticket_id: str) -> bool:
        opened = self.tickets[ticket_id]
        age_s = self.loop.now - opened.at
        return not opened.closed and age_s < self.settings.claim_grace - 1e-6

    # --- what decode engines do ---------------------------------------------------------

    def registered(self, run: DecodeRun) -> None:
        """A decode engine has its session: what earlier ones held is gone."""
        self._registered[run.host.name] = run
        assert self.core is not None
        for item in self.core.under(keys.LEASES):
            if "\x7f" in item.key:
                continue
            lease = Lease.FromString(item.value)
            holder = (lease.holder_engine_id, lease.holder_incarnation)
            if holder[0] == run.host.name and holder[1] != run.incarnation:
                self.breaks("a new incarnation ends the earlier one's leases", item.key)

    def finishing(self, run: DecodeRun, job: DecodeJob) -> None:
        self._finishing = job

    def held(self, run: DecodeRun, request_id: str, blocks: list[Block]) -> None:
        """Blocks are kept from now on."""
        job, now = self._finishing, self.loop.now
        assert job is not None
        assert job.request_id == request_id
        over_s = job.retention_s + self.settings.claim_grace
        self.kept[request_id] = Kept(
            run, job, blocks, now, may_free_at=now + over_s, free_by=now + over_s + SLACK_S
        )
        self.tell(f"{run.incarnation} keeps {len(blocks)} blocks of {request_id}")

    def released(self, run: DecodeRun, request_id: str) -> None:
        """Blocks are given back."""
        kept = self.kept[request_id]
        kept.released_at = self.loop.now
        self.tell(f"{run.incarnation} frees {request_id}")
        for block in kept.blocks:
            self._nobody_reads(run, block)
        if self.loop.now >= kept.may_free_at - 1e-6 or not kept.lease_id:
            return
        for ticket_id, opened in self.tickets.items():
            mine = opened.lease_id == kept.lease_id and opened.promised
            if mine and self._is_open(ticket_id):
                self.breaks("blocks with an open ticket are kept", f"{request_id} {ticket_id}")
        if self._is_held(kept) and not self._session_was_prolonged(kept):
            self.breaks("blocks of a lease that can be claimed are kept", request_id)

    def _is_held(self, kept: Kept) -> bool:
        """Whether the store shows that its lease can be claimed."""
        lease = self._in_store(kept)
        if lease is None or lease.lease_id != kept.lease_id:
            return False
        return lease.state == lease_pb2.LEASE_STATE_HELD

    def _in_store(self, kept: Kept) -> Lease | None:
        assert self.core is not None
        item = self.core.items.get(keys.lease(kept.job.text.conversation))
        return Lease.FromString(item.value) if item else None

    def _session_was_prolonged(self, kept: Kept) -> bool:
        """Whether the store keeps the session for longer than its TTL."""
        assert self.core is not None
        session = self.core.sessions.get(kept.session_id)
        return session is not None and self.loop.now > session.renewed + session.ttl_s

    def freed(self, run: DecodeRun, block: Block) -> None:
        """A block may be used again."""
        self._nobody_reads(run, block)

    def _nobody_reads(self, run: DecodeRun, block: Block) -> None:
        for reader in self.readers:
            if reader.source is run and block in reader.blocks and reader.may_use():
                self.breaks(
                    "no block is freed under a reader",
                    f"{run.incarnation} {block.block_id}, read by {reader.run.incarnation} "
                    f"with ticket {reader.answer.ticket_id}",
                )

    def check_ended(self) -> None:
        """Without faults for a while, only blocks of leases that can be claimed are kept."""
        for request_id, kept in self.kept.items():
            if kept.released_at == math.inf and not self._is_held(kept):
                kept.run.process.run(kept.run.side.drain)
                if kept.released_at == math.inf:
                    self.breaks("blocks of an ended lease are freed", request_id)

    def _check_budget(self) -> None:
        """Retained blocks stay under the budget, but for one turn's and a moment."""
        limit = self.settings.max_retained_fraction
        runs = {kept.run: 0 for kept in self.kept.values() if kept.released_at == math.inf}
        for kept in self.kept.values():
            if kept.released_at == math.inf:
                runs[kept.run] += len(kept.blocks)
        for run, blocks in runs.items():
            # While the lease service cannot be reached nothing can be given up.
            waits = run.process.paused or run.side._revocations.stuck()
            if waits or blocks <= limit * run.host.num_blocks:
                self._over_since.pop(run, None)
            elif self.loop.now > self._over_since.setdefault(run, self.loop.now) + OVER_S:
                self.breaks("retained blocks stay under their budget", f"{blocks}")

    def died(self, run: DecodeRun) -> None:
        """All its blocks are gone; nobody can read them."""
        for kept in self.kept.values():
            if kept.run is run and kept.released_at == math.inf:
                kept.released_at = self.loop.now

    def check_kept(self) -> None:
        """Nothing is kept for too long, nor too much."""
        self._check_budget()
        for request_id, kept in self.kept.items():
            late = kept.released_at == math.inf and self.loop.now > kept.free_by
            if late and not kept.run.process.paused:
                kept.run.process.run(kept.run.side.drain)  # as any next request would
                if kept.released_at == math.inf:
                    self.breaks("no block outlives its retention and the grace", request_id)

    # --- what prefill engines do --------------------------------------------------------

    def claimed(self, run: PrefillRun, ask: Ask, answer: Answer) -> None:
        """A claim was answered."""
        word = common_pb2.Outcome.Name(answer.outcome).removeprefix("OUTCOME_").lower()
        self.tell(f"{run.incarnation} claims: {word} {answer.detail} {answer.ticket_id}")
        if answer.outcome != common_pb2.OUTCOME_HIT:
            return
        self.hits += 1
        kept = self._by_lease[answer.lease_id]
        ids = set(answer.params["remote_block_ids"][0])
        blocks = [block for block in kept.blocks if block.block_id in ids]
        reader = Reader(run, kept.run, answer, Text(ask.conversation, ()), blocks)
        self.readers = [r for r in self.readers if r.may_use()]
        self.readers.append(reader)
        if kept.released_at < math.inf and kept.run.process.alive:
            self.breaks("a hit is on blocks that are kept", answer.lease_id)

    def starts(self, run: PrefillRun, job: PrefillJob, read_by: float) -> Reader:
        """A read begins."""
        answer = run.side._turns[job.request_id].answer
        for reader in self.readers:
            if reader.run is run and reader.answer is answer:
                reader.started, reader.text = run.host.clock(), job.text
                return reader
        raise AssertionError("a read without a claim")

    def uses(self, reader: Reader) -> None:
        """A read has ended well: the prompt's computation goes on from what it brought."""
        self.reads += 1
        for index, block in enumerate(reader.blocks):
            wanted = reader.text.block(index)
            content = block.content
            if content is None or not content.serves(wanted, reader.answer.usable_tokens):
                self.breaks("what is reused equals the prompt", f"{index} {content} {wanted}")
                return

    def closed(self, answer: Answer) -> None:
        """A reader will not read (any more)."""
        for reader in self.readers:
            if reader.answer is answer:
                reader.over = True
        if answer.ticket_id in self.tickets:
            self.tickets[answer.ticket_id].closed = True


def _words(lease: Lease | None) -> str:
    if lease is None:
        return "-"
    state = "HELD" if lease.state == lease_pb2.LEASE_STATE_HELD else "ENDING"
    return (
        f"{state} {lease.lease_id[:4]} turn {lease.turn} by {lease.holder_incarnation} "
        f"{[t.ticket_id[:4] for t in lease.tickets]} "
        f"{[(r.lease_id[:4], [t.ticket_id[:4] for t in r.tickets]) for r in lease.retiring]}"
    )
