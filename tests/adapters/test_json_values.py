"""What adapters keep beside a sample comes back from JSON as it was, bit for bit."""

import json

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from support.same import assert_equal

from mmpack.adapters.json_values import Held, decode, encode, held
from mmpack.schema.specs import Json


def objects(values):
    out = np.empty(len(values), dtype=object)
    for i, value in enumerate(values):
        out[i] = value
    return out


DTYPES = (np.float32, np.float64, np.int64, np.int16, np.uint8, np.bool_, np.dtype("<U3"))
ARRAYS = st.sampled_from(DTYPES).flatmap(
    lambda dtype: hnp.arrays(
        dtype, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3)
    )
)
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats()
    | st.text(max_size=4)
    | st.binary(max_size=4)
    | ARRAYS
    | ARRAYS.filter(lambda a: a.dtype.kind != "U").map(torch.from_numpy)
    | st.floats(width=32).map(np.float32)
    | st.just(torch.tensor([1.5, float("nan")], dtype=torch.bfloat16))
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(
            st.text(max_size=3) | st.sampled_from(["__tensor__", "__x"]), inner, max_size=3
        )
        | st.dictionaries(st.integers(), inner, max_size=2)
        | st.lists(inner, max_size=3).map(objects)
    ),
    max_leaves=8,
)


@given(VALUES)
def test_what_is_held_is_the_same_in_memory_and_in_a_trace(value):
    kept = Held(value)
    read = json.loads(json.dumps({"k": kept.to_json()}, allow_nan=False))
    nested = Json().write({"turns": {"0": {"k": kept}}, "n": 1}, False)
    assert nested["turns"]["0"] == {"k": kept.to_json()} and nested["n"] == 1
    for metadata in ({"k": kept}, read):
        assert_equal(held(metadata, "k"), value, ordered=True)
    assert held({}, "k") is None


def test_what_is_held_does_not_change_with_what_was_handed_in():
    given = {"a": [1], "b": torch.ones(2, requires_grad=True)}
    kept, thing = Held(given), object()
    assert decode(encode({"a": [thing]}))["a"][0] is thing  # which no JSON can hold
    given["a"].append(2)
    assert kept.value["a"] == [1] and not kept.value["b"].requires_grad
