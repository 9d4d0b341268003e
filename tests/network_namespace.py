"""A network namespace for tests: a host of its own, as far as the network goes, whose links
to this machine can be cut.

Real links between real network stacks, so that a cut is what a broken switch is: nothing is
refused, packets just do not arrive.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from dataclasses import dataclass

from required import unavailable

_numbers = itertools.count()


def missing() -> str:
    """What keeps namespaces from being made here, as a sentence; empty: nothing does."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need `ip`: run `apt-get install iproute2`"
    name = f"kvlease-probe-{os.getpid()}"
    try:
        _ip("netns", "add", name)
        _ip("netns", "del", name)
    except subprocess.CalledProcessError as error:
        return f"network namespaces cannot be made here: {error.stderr.strip()}"
    return ""


def require() -> None:
    """Where namespaces cannot be made the test is skipped, or fails where everything must
    run."""
    if reason := missing():
        unavailable(reason)


@dataclass(frozen=True)
class Link:
    """A switch of this machine, and a cable from it to the namespace."""

    switch: str
    device: str
    """Of either end of the cable."""
    host: str
    """This machine's address on it."""
    inside: str
    """The namespace's."""

    def cut(self) -> None:
        """Packets are lost from now on, in both directions. Both ends keep their devices,
        addresses and routes, so nobody notices but by waiting."""
        _ip("link", "set", self.device, "nomaster")

    def mend(self) -> None:
        """Undoes :meth:`cut`."""
        _ip("link", "set", self.device, "master", self.switch)


class NetworkNamespace:
    """Made on construction, with a loopback device and one link for each of ``links``.
    There is no route but to the other ends of the links."""

    def __init__(self, *links: str) -> None:
        number = next(_numbers)
        self.name = f"kvlease-{os.getpid()}-{number}"
        self._links: dict[str, Link] = {}
        _ip("netns", "add", self.name)
        try:
            self._inside("link", "set", "lo", "up")
            for index, link in enumerate(links):
                self._links[link] = self._connect(number, index)
        except BaseException:
            self.remove()
            raise

    def link(self, name: str) -> Link:
        """One of those that it was made with."""
        return self._links[name]

    @property
    def command(self) -> tuple[str, ...]:
        """What starts a program in it, put before the program's own command. It replaces
        itself: pid and session stay."""
        return ("ip", "netns", "exec", self.name)

    def remove(self) -> None:
        """Takes the links away, and the name. What still runs in it is cut off."""
        for link in self._links.values():
            _ip("link", "del", link.switch)
            _ip("link", "del", link.device)
        _ip("netns", "del", self.name)

    def _connect(self, number: int, index: int) -> Link:
        # 198.18.0.0/15 is for tests between networks (RFC 2544); one /30 is one cable.
        cable = (os.getpid() * 8 + number * 4 + index) % (1 << 15)
        first = (198 << 24) + (18 << 16) + cable * 4
        host, inside = (_dotted(first + end) for end in (1, 2))
        # Device names have at most 15 characters.
        link = Link(f"kvswitch{cable}", f"kvlink{cable}", host, inside)
        _ip("link", "add", link.switch, "type", "bridge")
        _ip("addr", "add", f"{host}/30", "dev", link.switch)
        _ip("link", "set", link.switch, "up")
        _ip("link", "add", link.device, "type", "veth", "peer", link.device, "netns", self.name)
        _ip("link", "set", link.device, "up", "master", link.switch)
        self._inside("addr", "add", f"{inside}/30", "dev", link.device)
        self._inside("link", "set", link.device, "up")
        return link

    def _inside(self, *arguments: str) -> None:
        _ip("-netns", self.name, *arguments)


def _dotted(address: int) -> str:
    return ".".join(str(address >> shift & 255) for shift in (24, 16, 8, 0))


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=10)
