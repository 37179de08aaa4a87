"""The policy `vllm` against the vLLM installed here, without an engine, and what its processor makes of a plan."""

import sys
from pathlib import Path

import numpy as np
import pytest
from support.video_infos import clip

from mmpack.video import sample
from mmpack.video.hand_over import hf_kwargs, hf_metadata

pytestmark = pytest.mark.engine
ORACLES = Path(__file__).resolve().parents[2] / "fixtures" / "video"


@pytest.fixture(scope="module")
def engine():
    sys.path.insert(0, str(ORACLES))
    import engine

    yield engine
    sys.path.remove(str(ORACLES))


def test_fresh_cases(engine):
    """Cases that are in no table."""
    from answers import Video, answer
    from cases import KNOWN, cases
    from test_policies import differences

    fresh = [c for c in cases("vllm", 40, "fresh") if c[0] not in KNOWN and c[0][2] < 1000]
    wrong = []
    for video, settings in fresh:
        row = {"video": video, "settings": settings}
        row["upstream"] = answer(engine.vllm, Video(*video), settings)
        wrong += [(row, d)] if (d := differences("vllm", row)) else []
    assert not wrong, wrong[:3]
    assert len(fresh) > 20


@pytest.mark.parametrize(
    ("policy", "given"),
    [
        ("qwen_vl_utils", {}),
        ("qwen_vl_utils", {"model": "qwen3_vl"}),
        ("transformers_qwen3_vl", {"max_pixels": 100_000}),
        ("vllm", {}),
        ("vllm", {"model": "qwen3_vl"}),
    ],
)
def test_the_processor_keeps_the_plan(engine, policy, given):
    from vllm.multimodal.processing.context import TimingContext
    from vllm.multimodal.processing.inputs import ProcessorInputs

    plan = sample(clip(113, 25.0, 160, 120), policy=policy, **given)
    model = plan.settings["model"]
    processor, _ = engine._processor(model)
    width, height = plan.loaded_size
    frames = np.zeros((plan.num_frames, height, width, 3), dtype=np.uint8)
    item = (frames, hf_metadata(plan) | {"do_sample_frames": False})
    inputs = ProcessorInputs(
        [engine.START, engine.VIDEO, engine.END],
        processor.info.parse_mm_data({"video": [item]}),
        hf_processor_mm_kwargs=hf_kwargs(plan),
    )
    out = processor.apply(inputs, TimingContext(enabled=False))["mm_kwargs"]["video"][0]
    assert tuple(out["video_grid_thw"].data.tolist()) == plan.grid_thw
    if plan.second_per_grid_ts is not None:
        seconds = np.float32(out["second_per_grid_ts"].data)
        assert seconds == np.float32(plan.second_per_grid_ts)
    else:
        assert tuple(float(t) for t in out["timestamps"].data) == plan.patch_timestamps
