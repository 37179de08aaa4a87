"""GLM's two policies: what transformers' own video processors choose and how large they make it; what they refuse."""

from types import SimpleNamespace

import numpy as np
import pytest
from support.video_infos import clip

from mmpack.errors import ArgumentError
from mmpack.video import sample

POLICIES = {
    "transformers_glm4v": "Glm4vVideoProcessor",
    "transformers_glm46v": "Glm46VVideoProcessor",
}
RATES = (2.0, 8.0, 12.5, 24000 / 1001, 25.0, 30000 / 1001, 30.0, 60.0)


@pytest.mark.upstream
@pytest.mark.parametrize("policy", POLICIES)
def test_frames_and_grids_are_transformers_own(policy):
    import transformers

    hf = getattr(transformers, POLICIES[policy])()
    random = np.random.default_rng(0)
    for _ in range(150):
        fps = float(random.choice(RATES))
        total = max(1, round(2 ** random.uniform(-1, 9.5) * fps))
        width, height = (int(n) for n in random.integers(20, 800, 2))
        given = {}
        if policy == "transformers_glm4v" and random.random() < 0.5:
            given = {"fps": float(random.choice([0.5, 1.0, 3.7, 8.0]))}
        info = clip(total, fps, width, height)
        metadata = SimpleNamespace(fps=fps, total_num_frames=total, duration=info.duration)
        wanted = hf.sample_frames(metadata, **given).tolist()
        if not wanted:
            with pytest.raises(ArgumentError, match="takes no frame"):
                sample(info, policy=policy, **given)
            continue
        plan = sample(info, policy=policy, **given)
        assert list(plan.indices) == wanted
        patches = hf.get_num_of_video_patches(len(wanted), height, width)
        assert np.prod(plan.grid_thw) == patches
        assert plan.patch_timestamps == tuple(i / fps for i in wanted[::2])


@pytest.mark.parametrize("policy", POLICIES)
def test_every_frame_and_refusals(policy):
    plan = sample(clip(5, None), policy=policy, do_sample_frames=False)
    assert plan.indices == (0, 1, 2, 3, 4) and plan.grid_thw[0] == 3 and plan.fps == 24.0
    with pytest.raises(ArgumentError, match="no frame rate"):
        sample(clip(50, None), policy=policy)
    with pytest.raises(ArgumentError, match="no budget for frames"):
        sample(clip(50), policy=policy, cap_pixels_per_frame=True)
    with pytest.raises(ArgumentError, match="model 'qwen3_vl' is unknown"):
        sample(clip(50), policy=policy, model="qwen3_vl")


def test_a_short_clip_by_hand():
    """Two seconds of 10 frames per second: 2 and 6 a second, in pairs."""
    assert sample(clip(20, 10.0), policy="transformers_glm4v").indices == (0, 5, 10, 15)
    six = sample(clip(20, 10.0), policy="transformers_glm46v").indices
    assert six == (0, 2, 4, 5, 7, 9, 10, 12, 14, 15, 17, 19)
    with pytest.raises(ArgumentError, match="too many frames"):
        sample(clip(2000, 25.0), policy="transformers_glm4v", fps=1e308)
    with pytest.raises(ArgumentError, match="no budget for frames"):
        sample(clip(50), policy="transformers_uniform", model="gemma4", cap_pixels_per_frame=True)
