"""verl on a CPU, as the conformance checks start it."""

from conformance.verl_cpu import make_engine, start

__all__ = ["make_engine", "start"]
