"""Does a family do what mmpack promises? Checks of a family by its kit, each against what transformers does alone.

`pytest -p mmpack.conformance.plugin --family NAME` runs them; `checks.CHECKS` lists them.
"""
