"""Rules of transformers that changed over the supported versions, against the one installed here."""

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.version import Version
from support.video_infos import clip

from mmpack.errors import ArgumentError
from mmpack.video import sample

pytestmark = pytest.mark.adapter
RULES = "5.8" if Version(transformers.__version__) < Version("5.15") else "5.15"


@settings(max_examples=60)
@given(st.integers(1, 200), st.sampled_from([10.0, 24000 / 1001, 25.0, 30.0]), st.integers(1, 12))
def test_timestamps(total, fps, count):
    from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

    count = min(count, total)
    plan = sample(
        clip(total, fps),
        policy="transformers_qwen3_vl",
        num_frames=count,
        transformers="5.8",  # takes one frame too
    )
    written = Qwen3VLProcessor._calculate_timestamps(None, list(plan.indices), fps, 2)
    assert list(plan.patch_timestamps) == written


@settings(max_examples=100)
@given(
    st.integers(1, 40),
    st.integers(8, 1200),
    st.integers(8, 1200),
    st.sampled_from([(4096, 25_165_824), (4096, 400_000), (500_000, 900_000)]),
)
def test_resize_of_qwen3_vl(frames, width, height, limits):
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize

    def upstream():
        return smart_resize(
            frames, height, width, factor=32, min_pixels=limits[0], max_pixels=limits[1]
        )

    def ours():
        return sample(
            clip(frames, 25.0, width, height),
            policy="transformers_qwen3_vl",
            do_sample_frames=False,
            min_pixels=limits[0],
            max_pixels=limits[1],
            transformers=RULES,
        )

    try:
        expected = upstream()
    except ValueError:
        with pytest.raises(ArgumentError, match="Fix: "):
            ours()
        return
    assert ours().size == expected[::-1]
