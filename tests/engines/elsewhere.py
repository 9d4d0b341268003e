"""An engine of a local stack on a host of its own: in a network namespace."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from network_namespace import NetworkNamespace

from kvlease.cli.launch import Launch
from kvlease.cli.parts import Part, Plan

SERVICES, ENGINES = "services", "engines"
"""The two links that such a host needs: to registry and lease service, and to those who
talk to the engine (routers, other engines)."""


@dataclass(frozen=True)
class PartElsewhere(Part):
    """A part whose command is started by another one."""

    starter: tuple[str, ...] = ()

    def launch(self) -> Launch:
        here = super().launch()
        return dataclasses.replace(here, argv=(*self.starter, *here.argv))


def moved(plan: Plan, name: str, namespace: NetworkNamespace) -> Plan:
    """The plan with the engine ``name`` in ``namespace``, and services that it reaches."""
    services, engines = namespace.link(SERVICES), namespace.link(ENGINES)

    def seen_from_there(endpoints: str) -> str:
        return ",".join(f"{services.host}:{_port(each)}" for each in endpoints.split(","))

    def part_of(part: Part) -> Part:
        if part.kind in ("registry", "lease"):
            listen = {f"KVLEASE_{part.kind.upper()}_LISTEN": f"0.0.0.0:{_port(part.grpc)}"}
            return dataclasses.replace(part, env={**part.env, **listen})
        if part.engine is None:
            return part
        if part.name != name:
            # Engines read from each other, so these have an address that is seen from there.
            return dataclasses.replace(
                part,
                http=f"{engines.host}:{part.engine.port}",
                # UCX leaves switches out unless it is told to take them.
                env={
                    **part.env,
                    "UCX_NET_DEVICES": f"lo,{engines.switch}",
                    "UCX_TCP_BRIDGE_ENABLE": "y",
                },
                engine=dataclasses.replace(part.engine, host=engines.host),
            )
        settings = part.engine.settings
        addresses = {
            field: seen_from_there(getattr(settings, field))
            for field in ("registry_endpoint", "lease_endpoint")
        }
        engine = dataclasses.replace(
            part.engine, host=engines.inside, settings=settings.model_copy(update=addresses)
        )
        return PartElsewhere(
            part.name,
            part.kind,
            http=f"{engines.inside}:{engine.port}",
            # Reads take the engines' link; vLLM's own processes talk over the loopback.
            env={**part.env, "UCX_NET_DEVICES": engines.device, "VLLM_HOST_IP": "127.0.0.1"},
            engine=engine,
            cpus=part.cpus,
            starter=namespace.command,
        )

    return dataclasses.replace(plan, parts=tuple(part_of(part) for part in plan.parts))


def _port(address: str) -> str:
    return address.rpartition(":")[2]
