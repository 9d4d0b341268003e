"""Claims and grants inside their callers' traces, received over real OTLP."""

from __future__ import annotations

import asyncio

from control_plane import CALL_S, ControlPlane, claim_request, grant_request
from otlp_receiver import Receiver

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"
METADATA = (("traceparent", f"00-{TRACE}-{PARENT}-01"),)


async def test_claims_and_grants_are_spans_of_their_callers_trace(receiver: Receiver) -> None:
    plane = ControlPlane({})
    await plane.start()
    try:
        holder = await plane.register()
        request = grant_request(holder, turn=3)
        await plane.lease.Grant(request, timeout=CALL_S, metadata=METADATA)
        await plane.lease.Claim(claim_request(), timeout=CALL_S, metadata=METADATA)
        await plane.lease.Claim(claim_request(), timeout=CALL_S)  # in no trace: no span
    finally:
        await plane.stop()  # exports what is left
    spans = await asyncio.to_thread(
        receiver.wait_for, TRACE, "lease_service.claim", "lease_service.grant"
    )
    for span in spans.values():
        assert (span.parent_id, span.service) == (PARENT, "kvlease-lease-service")
        assert span.attributes["kvlease.conversation"] == "c1"
        assert span.attributes["kvlease.tenant"] == "acme"
        assert not span.failed
    assert spans["lease_service.claim"].attributes["kvlease.outcome"] == "hit"
    assert spans["lease_service.grant"].attributes["kvlease.turn"] == 3
    assert len(receiver.spans) == 2
