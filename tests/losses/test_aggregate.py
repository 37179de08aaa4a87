"""Every aggregation by name against loops over samples in exact arithmetic."""

import math
from itertools import chain

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mmpack.losses.aggregate import aggregate

EXPECTED = {
    "token_mean": lambda parts, tokens, samples: math.fsum(chain(*parts)) / tokens,
    "sequence_mean_token_mean": lambda parts, tokens, samples: (
        math.fsum(math.fsum(p) / len(p) for p in parts if p) / samples
    ),
    "sequence_mean_token_sum": lambda parts, tokens, samples: math.fsum(chain(*parts)) / samples,
    "sequence_mean_token_sum_norm": lambda parts, tokens, samples: (
        math.fsum(chain(*parts)) / (samples * 50)
    ),
    "token_sum": lambda parts, tokens, samples: math.fsum(chain(*parts)),
}


@given(
    st.lists(st.lists(st.floats(-1e3, 1e3, width=32), max_size=6), min_size=1, max_size=6),
    st.sampled_from(list(EXPECTED)),
    st.booleans(),
)
def test_against_loops(parts, name, given_totals):
    cu = torch.tensor([0, *map(len, parts)]).cumsum(0).int()
    terms = torch.tensor(list(chain(*parts)), dtype=torch.float32)
    totals = {"total_tokens": 1000, "total_samples": 70} if given_totals else {}
    got = aggregate(
        terms, cu, name, max_tokens=50 if name == "sequence_mean_token_sum_norm" else None, **totals
    )
    tokens = 1000 if given_totals else max(len(terms), 1)
    expected = EXPECTED[name](parts, tokens, 70 if given_totals else len(parts))
    assert float(got) == pytest.approx(expected, rel=1e-12, abs=1e-10)
