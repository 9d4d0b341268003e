"""kvlease: the control plane for bidirectional KV transfer in vLLM."""

__version__ = "0.1.0"
