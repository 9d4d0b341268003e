"""Where leases and conversations are in the store."""

from __future__ import annotations

from kvlease.registry.keys import part
from kvlease.v1.common_pb2 import Conversation

LEASES = "/leases/"
CONVERSATIONS = "/conversations/"


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


def leases_of(tenant: str, model: str) -> str:
    """The prefix of a tenant's leases, or of a tenant's with one model; of all leases
    where both are empty."""
    return LEASES + "".join(f"{part(text)}/" for text in (tenant, model) if text)
