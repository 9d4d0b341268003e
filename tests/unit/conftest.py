"""Settings for all unit tests."""

from __future__ import annotations

from hypothesis import settings

# Time on a busy machine says nothing about a rule.
settings.register_profile("kvlease", deadline=None)
settings.load_profile("kvlease")
