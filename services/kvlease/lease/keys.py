"""Where leases and conversations are in the store."""

from __future__ import annotations

from urllib.parse import unquote

from kvlease.registry.keys import part
from kvlease.v1.common_pb2 import Conversation

LEASES = "/leases/"
CONVERSATIONS = "/conversations/"
HISTORIES = "/histories/"


def _path(conversation: Conversation) -> str:
    return "/".join(
        map(part, (conversation.tenant, conversation.model, conversation.conversation_id))
    )


def lease(conversation: Conversation) -> str:
    """The key of the conversation's lease. There is one lease at most."""
    return LEASES + _path(conversation)


def conversation(conversation: Conversation) -> str:
    """The key of what is remembered of the conversation."""
    return CONVERSATIONS + _path(conversation)


def history(conversation: Conversation) -> str:
    """The key of what became of the conversation's last turns."""
    return HISTORIES + _path(conversation)


def histories_of(tenant: str) -> str:
    """The prefix of a tenant's histories; of all where it is empty."""
    return HISTORIES + (f"{part(tenant)}/" if tenant else "")


def conversation_of(history_key: str) -> Conversation:
    """The inverse of :func:`history`."""
    tenant, model, name = map(unquote, history_key.removeprefix(HISTORIES).split("/"))
    return Conversation(tenant=tenant, model=model, conversation_id=name)


def leases_of(tenant: str, model: str) -> str:
    """The prefix of a tenant's leases, or of a tenant's with one model; of all leases
    where both are empty."""
    return LEASES + "".join(f"{part(text)}/" for text in (tenant, model) if text)
