"""Conformance checks of a model family, described by its kit, each against what transformers alone computes.

`pytest -p mmpack.conformance.plugin --family NAME` runs them; `checks.CHECKS` lists them.
"""
