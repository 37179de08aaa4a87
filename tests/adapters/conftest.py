"""The matrix's fixture (drawn problems, fixed responses and logprobs), which several frameworks' tests read."""

from typing import Any

import pytest


@pytest.fixture(scope="session")
def fixture() -> Any:
    from matrix.fixture import make_fixture

    return make_fixture()


@pytest.fixture
def processed(fixture: Any) -> Any:
    """The fixture's rows as mmpack's own processor makes them: samples that no framework has seen."""
    return [
        fixture.processor(fixture.messages[p], ids, sample_id=i, group_id=g, rollout_logprobs=lp)
        for (p, ids, lp), (i, g) in zip(fixture.rows, fixture.ids, strict=True)
    ]
