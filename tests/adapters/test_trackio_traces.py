"""Samples as messages with pictures; where trackio is, logged and read back by its own storage."""

import hashlib
import sys

import numpy as np
import pytest
from support.samples import make_sample

import mmpack as mp
from mmpack.adapters.trackio import _messages, _metadata, to_traces
from mmpack.errors import ArgumentError, MissingExtraError
from mmpack.view.media import finder

PIXELS = np.arange(4 * 6 * 3, dtype=np.uint8).reshape(4, 6, 3)
HASH = hashlib.sha256(b"x").hexdigest()  # as make_medium names it


def sample():
    picture = ("image", (1, 4, 4))
    parts = [("text", [1, 2]), (*picture, "x"), ("text", [3]), ("response", [4, 5])]
    parts += [("observation", [6]), (*picture, "y"), ("response", [7])]
    out = make_sample(parts, "a/0", "a")
    out.rewards = [mp.Score("exact", 1.0), mp.Score("exact", 0.5), mp.Score("length", -0.25)]
    return out


def decode(ids):
    return "".join(f"<{i}>" for i in ids)


def test_messages_say_who_wrote_which_tokens():
    own, drawn = sample(), []

    def image(pixels, caption):
        drawn.append((pixels, caption))
        return object()

    messages = list(_messages(own, decode, finder(None, {HASH: PIXELS}), image))
    assert [m["role"] for m in messages] == ["user", "assistant", "tool", "user", "assistant"]
    before, picture, after = messages[0]["content"]
    assert decode([1, 2]) in before["text"] and decode([3]) in after["text"]
    assert not isinstance(picture, dict)
    [(pixels, caption)] = drawn
    assert np.array_equal(pixels, PIXELS) and caption == "x, image"
    assert messages[1]["content"] == decode([4, 5]) and messages[4]["content"] == decode([7])
    texts = repr([m["content"] for m in messages])
    assert f"<{own.input_ids[own.modality_spans[0].start]}>" not in texts  # no placeholder is text
    assert "[image y]" in texts  # not at hand
    found = _metadata(own)
    assert (found["rewards/exact"], found["rewards/length"]) == (1.5, -0.25)
    assert found["trained_tokens"] == 3 and found["group_id"] == "a" and "turn" not in found


def test_without_trackio(monkeypatch):
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'mmpack\[trackio\]'"):
        to_traces([sample()], decode)
    with pytest.raises(ArgumentError, match=r"^to_traces: limit"):
        to_traces([sample()], decode, limit=0)


@pytest.mark.logging
def test_trackio_keeps_them(tmp_path, monkeypatch):
    for name in [n for n in sys.modules if n.partition(".")[0] == "trackio"]:
        monkeypatch.delitem(sys.modules, name)  # it reads the folder when it is imported
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    trackio = pytest.importorskip("trackio")
    given = {"a/0": 0.75}
    traces = to_traces(
        (s for s in [sample()] * 3), decode, pictures={HASH: PIXELS}, advantages=given, limit=2
    )
    assert len(traces) == 2 and all(isinstance(t, trackio.Trace) for t in traces)
    stored = traces[0]._to_dict(project="p", run="r", step=3)
    [picture] = [part for part in stored["messages"][0]["content"] if "_type" in part]
    assert picture["_type"] == "trackio.image" and stored["metadata"]["advantage"] == 0.75
    from PIL import Image

    [path] = tmp_path.rglob(picture["file_path"].rpartition("/")[2])
    assert np.array_equal(np.asarray(Image.open(path).convert("RGB")), PIXELS)
