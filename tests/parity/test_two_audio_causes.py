"""Two causes in one sample that heard an audio: both are named, for every pair of them."""

from itertools import combinations

import pytest
from support.samples import make_sample

import mmpack as mp
from mmpack.parity.causes.audio import CAUSES

SECONDS = 0.399  # no whole number of frames


def hear(rate=16_000, samples=16_000, hop=160, padding="max_length", system=(11, 12), end=True):
    """A picture, an audio of `samples` samples, a question and a response; what its features are follows from these."""
    frames = int(SECONDS * samples) // hop
    frames += padding == "max_length"  # the last part of a frame counts
    response = [700, 703, 151645] if end else [700, 703]
    sample = make_sample(
        [
            ("text", system),
            ("image", (1, 4, 8), "diagram"),
            ("audio", (frames, 1, 1), "call"),
            ("text", [21, 22]),
            ("response", response),
        ],
        family="qwen2_5_omni",
        finish_reason="stop",
    )
    heard = sample.media[1]
    heard.sampling_rate, heard.hop_length = rate, hop
    heard.num_samples, heard.source = int(SECONDS * samples), "call.wav"
    heard.content_hash = f"sha256:{samples:064x}"
    heard.cache_key = f"sha256:{samples:032x}{frames:032x}"
    sample.processor = {
        "audio": {"sampling_rate": 16_000, "hop_length": hop, "padding": padding},
        "chat_template": f"sha256:{system[0]:064x}",
    }
    return sample


# what the trainer did otherwise
MECHANISMS = {
    "audio_sampling_rate": {"rate": 8_000, "samples": 8_000},
    "audio_hop": {"hop": 320},
    "audio_padding": {"padding": "longest"},
    "chat_template": {"system": (98, 12)},
    "stop_token": {"end": False},
}


def causes_of(*names):
    left, right = hear(), hear(**{k: v for name in names for k, v in MECHANISMS[name].items()})
    found = set(mp.compare([left], [right]).causes)
    assert set(mp.compare([right], [left]).causes) == found
    return found


def test_each_cause_of_an_audio_is_here():
    assert set(CAUSES) <= MECHANISMS.keys()
    assert mp.compare([hear()], [hear()]).ok


@pytest.mark.parametrize("name", MECHANISMS)
def test_one(name):
    assert causes_of(name) == {name}


@pytest.mark.parametrize(("one", "two"), list(combinations(MECHANISMS, 2)))
def test_two(one, two):
    assert causes_of(one, two) == {one, two}
