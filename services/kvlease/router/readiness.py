"""Whether turns can be served: by the rule that picks a turn's engine, and with the same
knock at the door."""

from __future__ import annotations

from kvlease.router import rules
from kvlease.router.engines import Engines
from kvlease.router.turn import DECODE, PREFILL
from kvlease.router.upstream import Upstream
from kvlease.v1 import lease_pb2, registry_pb2


async def live_decode(
    engines: Engines,
    upstream: Upstream,
    model: str,
    lease: lease_pb2.Lease | None = None,
    affinity: str = "",
    *,
    knock: bool = False,
) -> rules.Choice:
    """The decode engine that a turn would go to now. One that may be dead is knocked at,
    before a prefill engine computes a prompt for nobody; with ``knock``, any is. One that
    accepts no connection is suspect."""
    refusing: dict[str, str] = {}
    while True:
        candidates = engines.candidates(DECODE, model)
        choice = rules.choose_decode(candidates, lease, affinity, refusing)
        engine = choice.engine
        if engine is None and refusing:
            names = ", ".join(sorted(refusing.values()))
            return rules.Choice(None, f"no connection is accepted by {names}; {choice.reason}")
        doubtful = [c.engine for c in candidates if c.suspect or c.departed]
        if engine is None or not (knock or engine in doubtful):
            return choice
        if await upstream.accepts(engine):
            return choice
        engines.suspect(engine)
        refusing[engine.incarnation] = engine.engine_id


class Readiness:
    """What a turn would meet now. A turn needs a decode engine; without a prefill engine
    it is a ``miss_engine``, and is answered. But a model whose first prefill engine has
    not come yet is still being started, and is not ready."""

    def __init__(self, engines: Engines, upstream: Upstream) -> None:
        self._engines = engines
        self._upstream = upstream

    async def unready_reason(self) -> str:
        """Why turns cannot be served, as a sentence; empty if those of a model can."""
        reason = self._engines.unready_reason()
        if reason:
            return reason
        reasons = []
        for model in self._engines.complete_models():
            choice = await live_decode(self._engines, self._upstream, model, knock=True)
            if choice.engine is not None:
                return ""
            reasons.append(f"The model {model!r} cannot be served: {choice.reason}.")
        return " ".join([*reasons, "Start a decode engine."])

    def warnings(self) -> list[str]:
        """What turns that are served have to do without, as sentences."""
        found = []
        for model in self._engines.complete_models():
            candidates = self._engines.candidates(PREFILL, model)
            if all(candidate.departed or _drains(candidate) for candidate in candidates):
                choice = rules.choose_prefill(candidates, "")
                found.append(
                    f"Decode engines compute the prompts of {model!r}, none of which hits: "
                    f"{choice.reason}. Start a prefill engine."
                )
        return found

    def draining(self) -> list[str]:
        """The engines that get no new turns, by id."""
        rows = self._engines.overview()
        return [candidate.engine.engine_id for _, _, candidate in rows if _drains(candidate)]


def _drains(candidate: rules.Candidate) -> bool:
    return candidate.engine.state == registry_pb2.ENGINE_STATE_DRAINING
