"""What can go wrong with a request to etcd, and the sentence that says what to do."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

import grpc

from kvlease.store.base import StoreUnavailable


class Kind(Enum):
    """What an error says about the request."""

    UNSENT = auto()
    """No member got it."""
    UNKNOWN = auto()
    """It may have been applied, and may be yet."""
    STALE_TOKEN = auto()
    """It was refused: the authentication token is not valid any more."""
    NO_SESSION = auto()
    """It was refused: the lease has ended."""
    SESSION_EXISTS = auto()
    """It was refused: a lease with this id exists."""
    COMPACTED = auto()
    """It was refused: the revision is no longer kept."""
    REFUSED = auto()
    """It was refused, and would be again."""
    CLOSED = auto()
    """The store was closed."""


class EtcdError(StoreUnavailable):
    """A request to etcd failed. The message is for people."""

    def __init__(self, kind: Kind, message: str) -> None:
        super().__init__(message)
        self.kind = kind


_BY_DETAIL: dict[str, Kind] = {
    # Texts of etcd's api/v3rpc/rpctypes/error.go.
    "requested lease not found": Kind.NO_SESSION,
    "lease already exists": Kind.SESSION_EXISTS,
    "required revision has been compacted": Kind.COMPACTED,
    "invalid auth token": Kind.STALE_TOKEN,
    "revision of auth store is old": Kind.STALE_TOKEN,
    "revision in header is old": Kind.STALE_TOKEN,
    "too many requests": Kind.UNKNOWN,
    # gRPC's own, before a connection exists.
    "failed to connect to all addresses": Kind.UNSENT,
    "errors resolving": Kind.UNSENT,
    "DNS resolution failed": Kind.UNSENT,
}

_PASSING = {
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.ABORTED,
}


def classify(code: grpc.StatusCode, details: str) -> Kind:
    """Where in doubt, the answer is ``UNKNOWN``."""
    for text, kind in _BY_DETAIL.items():
        if text in details:
            return kind
    return Kind.UNKNOWN if code in _PASSING else Kind.REFUSED


@dataclass(frozen=True)
class Advice:
    """Turns statuses into sentences that name the setting to change."""

    endpoints: str
    prefix: str
    user: str
    tls: bool
    timeout_s: float

    def error(self, endpoint: str, code: grpc.StatusCode, details: str) -> EtcdError:
        kind = classify(code, details)
        return EtcdError(kind, self._sentence(kind, endpoint, code, details))

    def silent(self, endpoint: str) -> EtcdError:
        """A member did not answer in time."""
        return self.error(endpoint, grpc.StatusCode.DEADLINE_EXCEEDED, "")

    def _sentence(self, kind: Kind, endpoint: str, code: grpc.StatusCode, details: str) -> str:
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return (
                f"etcd at {self.endpoints} did not answer within {self.timeout_s:g} s: check "
                "that it runs and has a leader, or raise etcd_timeout"
            )
        for text, sentence in self._known(endpoint).items():
            if text in details:
                return sentence
        cause = details.removeprefix("etcdserver: ").rpartition("last error: ")[2]
        if cause == "Internal error from Core":  # gRPC's, for a write on a broken stream
            cause = "the connection broke"
        if kind in (Kind.UNSENT, Kind.UNKNOWN):
            hint = "does not use TLS, leave etcd_ca empty" if self.tls else "uses TLS, set etcd_ca"
            return (
                f"etcd cannot be reached at {self.endpoints} ({cause}): start it, or correct "
                f"etcd_endpoints; if it {hint}"
            )
        return f"etcd at {endpoint} refuses a request: {cause} ({code.name})"

    def _known(self, endpoint: str) -> dict[str, str]:
        grant = f"`etcdctl role grant-permission ROLE readwrite --prefix {self.prefix}`"
        who = f"user {self.user!r}"
        return {
            "Connection refused": (
                f"no etcd listens at {self.endpoints}: start it, or correct etcd_endpoints"
            ),
            "errors resolving": (
                f"the host name of {endpoint} cannot be resolved: correct etcd_endpoints"
            ),
            "CERTIFICATE_VERIFY_FAILED": (
                f"the certificate of etcd at {endpoint} was not signed by the CA in etcd_ca, or "
                "is for another host name: correct etcd_ca or etcd_endpoints"
            ),
            "Hostname Verification Check failed": (
                f"the certificate of etcd at {endpoint} is for another host name: name the "
                "host in etcd_endpoints as the certificate does"
            ),
            # What gRPC makes of the alert that ends a connection after the handshake.
            "TSI_DATA_CORRUPTED": (
                f"etcd at {endpoint} does not accept the client: set etcd_cert and etcd_key to a "
                "client certificate that its --trusted-ca-file has signed"
            ),
            "WRONG_VERSION_NUMBER": (
                f"etcd at {endpoint} does not use TLS: leave etcd_ca empty, or turn TLS on in etcd"
            ),
            "Failed parsing HTTP/2": (
                f"what listens at {endpoint} is not etcd: correct etcd_endpoints"
            ),
            "invalid user ID or password": (
                f"etcd does not accept {who} with this password: correct etcd_user or etcd_password"
            ),
            "user name is empty": (
                f"etcd at {endpoint} requires authentication: set etcd_user and etcd_password"
            ),
            "authentication is not enabled": (
                f"etcd at {endpoint} has authentication off: leave etcd_user empty, or turn "
                "authentication on in etcd"
            ),
            "permission denied": (
                f"etcd {who} may not use keys under {self.prefix}: grant one of its roles that "
                f"with {grant}"
            ),
            "database space exceeded": (
                f"the database of etcd at {endpoint} is full: compact and defragment it or raise "
                "--quota-backend-bytes, then run `etcdctl alarm disarm`"
            ),
            "message larger than max": (
                f"etcd at {endpoint} refuses a value as too large: raise --max-request-bytes"
            ),
            "request is too large": (
                f"etcd at {endpoint} refuses a value as too large: raise --max-request-bytes"
            ),
        }
