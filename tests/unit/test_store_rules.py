"""The stores' rules that need no store."""

from __future__ import annotations

import grpc
import pytest

from kvlease.store.base import Changed, Delete, Put, Removed, SessionLost, Synced, Versioned
from kvlease.store.etcd_api import Keyspace, lease_id_of, prefix_end, session_id_of
from kvlease.store.etcd_errors import Kind, classify
from kvlease.store.etcd_settle import Attempt
from kvlease.store.view import View

A1 = Versioned("/a", b"1", 5)
A2 = Versioned("/a", b"2", 7)
B1 = Versioned("/b", b"1", 6)


class TestView:
    def test_a_key_is_reported_once_a_revision(self) -> None:
        view = View()
        assert view.change(A1) == Changed(A1)
        assert view.change(A1) is None
        assert view.change(A2) == Changed(A2)

    def test_the_removal_of_a_key_that_was_never_reported_is_not_reported(self) -> None:
        assert View().remove("/a") is None

    def test_a_removed_key_is_reported_with_its_last_value(self) -> None:
        view = View()
        view.change(A1)
        view.change(A2)
        assert view.remove("/a") == Removed("/a", A2)
        assert view.remove("/a") is None

    def test_a_new_state_is_reported_by_its_differences(self) -> None:
        view = View()
        view.change(A1)
        view.change(B1)
        assert view.replace([A2]) == [Removed("/b", B1, after_gap=True), Changed(A2), Synced()]
        assert view.replace([A2]) == [Synced()]


class TestAttempt:
    """``seen`` is 10: an attempt that was applied has a higher revision."""

    @staticmethod
    def attempt(*writes: Put | Delete, expect: dict[str, int] | None = None) -> Attempt:
        return Attempt(expect or {}, writes, fence=b"", seen=10)

    def test_our_value_at_a_later_revision_was_written_by_us(self) -> None:
        attempt = self.attempt(Put("/a", b"1"), Put("/b", b"1"))
        assert attempt.judge({"/a": Versioned("/a", b"1", 12), "/b": None}) == 12

    def test_a_key_that_is_as_old_as_before_was_not_written(self) -> None:
        attempt = self.attempt(Put("/a", b"2"))
        assert attempt.judge({"/a": Versioned("/a", b"1", 10)}) == 0

    def test_our_value_at_an_old_revision_was_not_written_by_us(self) -> None:
        attempt = self.attempt(Put("/a", b"1"))
        assert attempt.judge({"/a": Versioned("/a", b"1", 10)}) == 0

    def test_a_key_that_is_still_there_was_not_deleted(self) -> None:
        assert self.attempt(Delete("/a")).judge({"/a": Versioned("/a", b"1", 9)}) == 0

    @pytest.mark.parametrize("now", [None, Versioned("/a", b"3", 12)])
    def test_a_key_that_is_gone_or_newer_proves_nothing(self, now: Versioned | None) -> None:
        assert self.attempt(Put("/a", b"2")).judge({"/a": now}) is None
        assert self.attempt(Delete("/a")).judge({"/a": now}) is None

    def test_a_comparison_alone_has_nothing_to_be_settled(self) -> None:
        assert self.attempt(expect={"/a": 3}).judge({}) == 0

    def test_one_of_our_values_among_the_changes_of_a_revision_is_ours(self) -> None:
        attempt = self.attempt(Put("/a", b"1", "s"), Delete("/b"))
        assert attempt.made([Versioned("/a", b"1", 12, "s"), "/b"])
        assert not attempt.made([Versioned("/a", b"2", 12, "s"), "/b"])
        assert not attempt.made([Versioned("/a", b"1", 12), "/b"])
        assert not attempt.made(["/b"])

    def test_a_deletion_is_ours_if_it_is_of_our_keys(self) -> None:
        attempt = self.attempt(Delete("/a"), Delete("/b"), expect={"/a": 3})
        assert attempt.made(["/a"])
        assert attempt.made(["/b", "/a"])
        assert not attempt.made(["/b"])
        assert not attempt.made(["/c"])
        assert not attempt.made(["/a", Versioned("/b", b"1", 12)])
        assert not attempt.made([])

    def test_what_was_written_together_with_others_is_ours_too(self) -> None:
        others = ["/c", Versioned("/d", b"1", 12)]
        assert self.attempt(Delete("/a"), expect={"/a": 3}).made(["/a", *others])
        assert self.attempt(Put("/b", b"1")).made([Versioned("/b", b"1", 12), *others])


class TestErrors:
    @pytest.mark.parametrize(
        ("code", "details", "kind"),
        [
            ("UNAVAILABLE", "failed to connect to all addresses; last error: x", Kind.UNSENT),
            ("UNAVAILABLE", "Socket closed", Kind.UNKNOWN),
            ("UNAVAILABLE", "etcdserver: leader changed", Kind.UNKNOWN),
            ("UNAVAILABLE", "etcdserver: request timed out", Kind.UNKNOWN),
            ("DEADLINE_EXCEEDED", "Deadline Exceeded", Kind.UNKNOWN),
            ("RESOURCE_EXHAUSTED", "etcdserver: too many requests", Kind.UNKNOWN),
            ("RESOURCE_EXHAUSTED", "etcdserver: mvcc: database space exceeded", Kind.REFUSED),
            ("UNAUTHENTICATED", "etcdserver: invalid auth token", Kind.STALE_TOKEN),
            ("NOT_FOUND", "etcdserver: requested lease not found", Kind.NO_SESSION),
            ("FAILED_PRECONDITION", "etcdserver: lease already exists", Kind.SESSION_EXISTS),
            (
                "OUT_OF_RANGE",
                "etcdserver: mvcc: required revision has been compacted",
                Kind.COMPACTED,
            ),
            ("PERMISSION_DENIED", "etcdserver: permission denied", Kind.REFUSED),
        ],
    )
    def test_an_error_is_told_by_what_it_says_about_the_request(
        self, code: str, details: str, kind: Kind
    ) -> None:
        assert classify(grpc.StatusCode[code], details) is kind


class TestKeyspace:
    @pytest.mark.parametrize(
        ("prefix", "end"),
        [(b"/a", b"/b"), (b"/a/", b"/a0"), (b"a\xff", b"b"), (b"\xff\xff", b"\0"), (b"", b"\0")],
    )
    def test_the_end_of_a_prefix_is_the_first_key_beyond_it(
        self, prefix: bytes, end: bytes
    ) -> None:
        assert prefix_end(prefix) == end

    @pytest.mark.parametrize("root", ["", "/", "/kvlease/v1", "/kvlease/v1/"])
    def test_a_key_comes_back_as_it_went(self, root: str) -> None:
        keyspace = Keyspace.of(root)
        assert keyspace.key(keyspace.encode("/a/é")) == "/a/é"

    def test_keys_that_are_not_the_services_are_not_shown(self) -> None:
        keyspace = Keyspace.of("/root")
        assert keyspace.key(keyspace.fence("x")) is None
        assert keyspace.key(b"/root/\xff") is None

    def test_a_session_id_is_sixteen_hex_digits(self) -> None:
        assert session_id_of(255) == "00000000000000ff"
        assert lease_id_of("00000000000000ff") == 255

    @pytest.mark.parametrize("session_id", ["", "x", "0", "-5", "8" + 15 * "0"])
    def test_what_cannot_be_a_session_id_is_a_lost_session(self, session_id: str) -> None:
        with pytest.raises(SessionLost):
            lease_id_of(session_id)
