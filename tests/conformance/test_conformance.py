"""Every family that has a kit against the conformance checks, the longer ones marked slow; `pytest --family NAME`.

The plugin gives families and checks: `pytest.mark.adapter` to the shorter ones, which older transformers run too, else
`pytest.mark.slow`; and `pytest.mark.verl`.
"""

import pytest

from mmpack.conformance.family_tests import subject, test_family

pytestmark = pytest.mark.few(24)
__all__ = ["subject", "test_family"]
