"""Temporal patches dropped where a video is laid out otherwise than Qwen's: clock times, and a sound among patches."""

import numpy as np
import pytest
from support.kits import get_kit
from support.kits.samples import sample_of

import mmpack as mp
from mmpack.video.drop import drop_frames


@pytest.fixture(scope="module")
def gemma4():
    kit = get_kit("gemma4")
    if not kit.available:
        pytest.skip("this transformers has no Gemma 4")
    return mp.wrap_processor(kit.processor(), family="gemma4")


@pytest.mark.parametrize("gone", [[0], [1], [0, 1], [2]])
def test_clock_times_are_of_one_length(gemma4, gone):
    """From 0 to 20 seconds a number of seconds gets a digit more, a clock does not."""
    frames = np.random.default_rng(0).integers(0, 256, (3, 96, 96, 3), dtype=np.uint8)

    def sample(kept):
        times = {"fps": 1.0, "frames_indices": 20 * np.array(kept), "total_num_frames": 60}
        video = {"type": "video", "video": (frames[kept], times)}
        content = [{"type": "text", "text": "So"}, video, {"type": "text", "text": "what?"}]
        return gemma4([{"role": "user", "content": content}], [5, 6], sample_id="s")

    found = drop_frames(sample([0, 1, 2]), 0, gone)
    wanted = sample([k for k in range(3) if k not in gone])
    assert found.input_ids.tolist() == wanted.input_ids.tolist()
    assert found.modality_spans == wanted.modality_spans
    assert found.loss_spans == wanted.loss_spans
    assert np.array_equal(found.position_ids, wanted.position_ids)


@pytest.mark.parametrize("family", ["qwen2_5_omni", "qwen3_omni_moe"])
def test_a_video_with_its_sound_is_refused(family):
    film = ("film", ((3, 4, 4), (260, 1, 1)), "film")
    sample = sample_of(get_kit(family), [("text", [1, 2]), film, ("loss", [3, 4])])
    with pytest.raises(mp.ArgumentError, match=r"the sound of 'film' lies among .* Fix: make"):
        drop_frames(sample, 0, [0])
