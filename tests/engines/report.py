"""What engine tests have to say at the end of a run."""

from __future__ import annotations

FAULT_TABLE: list[str] = []
"""Lines of test_fault_table."""
