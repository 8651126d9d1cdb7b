"""Faults, load and hostile input, counted: `python -m soak`. Everything stays on this machine, on loopback."""
