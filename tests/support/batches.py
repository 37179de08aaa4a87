"""Random samples that may lie in one pack: of one family, their videos running forward."""

from __future__ import annotations

from hypothesis import strategies as st
from support.samples import samples

from mmpack.families import FAMILIES
from mmpack.schema.sample import Sample

PACKABLE = tuple(name for name, family in FAMILIES.items() if family.packing == "yes")


@st.composite
def batches(draw: st.DrawFn, max_size: int = 4) -> list[Sample]:
    """One sample or more; at times one comes twice."""
    one = samples(families=(draw(st.sampled_from(PACKABLE)),))
    out = draw(st.lists(one, min_size=1, max_size=max_size))
    for sample in out:
        for medium in sample.media:
            if medium.second_per_grid_ts is not None:
                medium.second_per_grid_ts = abs(medium.second_per_grid_ts) % 100
    if draw(st.booleans()):
        out.append(draw(st.sampled_from(out)))
    return out
