"""Every family that has a kit against the conformance checks, the longer ones marked slow; `pytest --family NAME`."""

import pytest

from mmpack.conformance.family_tests import subject, test_family

# The plugin gives families and checks, marked pytest.mark.slow and pytest.mark.verl where they are such.
pytestmark = pytest.mark.adapter
__all__ = ["subject", "test_family"]
