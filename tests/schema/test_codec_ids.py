"""Audio in a trace: codec ids are read, written and checked; `modality: "audio"` and packing are refused."""

import json
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.samples import full_sample, make_sample

import mmpack as mp
from mmpack.schema.trace import read_trace, write_trace


def audio(codes=((1, 2, 3), (7, 0, 2)), sizes=(4, 8), rate=12.5, **fields):
    return mp.schema.CodecIds("codec r1", np.array(codes, np.int32), tuple(sizes), rate, **fields)


def heard(*pieces):
    sample = make_sample([("text", [1, 2]), ("response", [3, 4])])
    sample.codec_ids = list(pieces)
    return sample


@st.composite
def pieces(draw):
    sizes = draw(st.lists(st.integers(1, 2**31 - 1), min_size=1, max_size=4))
    frames = draw(st.integers(1, 6))
    codes = [draw(st.lists(st.integers(0, s - 1), min_size=frames, max_size=frames)) for s in sizes]
    rate = draw(st.floats(1e-3, 1e6))
    metadata = draw(st.dictionaries(st.sampled_from(["batch_shape", "x"]), st.integers(0, 9)))
    hashed = draw(st.none() | st.just("sha256:ab"))
    return audio(codes, sizes, rate, content_hash=hashed, metadata=metadata)


@settings(max_examples=15, deadline=None)
@given(st.lists(pieces(), max_size=3), st.sampled_from([".jsonl", ".jsonl.zst", ".parquet"]))
def test_codec_ids_survive(tmp_path_factory, given_pieces, suffix):
    path = tmp_path_factory.mktemp("t") / f"t{suffix}"
    samples = [heard(*given_pieces), make_sample([("text", [1])], "other")]
    write_trace(path, samples)
    assert list(read_trace(path)) == samples
    assert mp.validate(read_trace(path)) == []
    assert mp.compare(path, path).ok


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda piece: piece.update(codes=[[1, 2], [3]]), "MM008"),
        (lambda piece: piece.update(codes=[1, 2]), "MM003"),
        (lambda piece: piece.update(codes=[[0.5, 2]]), "MM003"),
        (lambda piece: piece.update(frame_rate="fast"), "MM003"),
        (lambda piece: piece.pop("codec"), "MM004"),
    ],
)
def test_another_structure_is_not_read(tmp_path, change, code):
    record = heard(audio()).to_dict()
    change(record["codec_ids"][0])
    (tmp_path / "t.jsonl").write_text(json.dumps(record))
    with pytest.raises(mp.errors.TraceError, match=code):
        list(read_trace(tmp_path / "t.jsonl"))


# ---- refused -------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [mp.pack, mp.pad, partial(mp.plan, max_tokens=100)])
def test_no_batch_and_no_plan_leaves_audio_behind_in_silence(make):
    bare = make_sample([("text", [1]), ("response", [2])], "bare")
    with pytest.raises(mp.SchemaError, match=r"s0\.codec_ids holds 1 of audio.*MM407"):
        make([bare, heard(audio())])
    make([bare, heard()])
    dropped = make([bare, heard(audio())], on_invalid="drop").dropped
    assert "MM407" in str(dropped) and len(dropped) == 1


@pytest.mark.parametrize("place", ["media", "modality_spans"])
def test_audio_of_a_family_that_hears_none_is_refused(tmp_path, place):
    record = full_sample().to_dict()
    record[place][0]["modality"] = "audio"
    (tmp_path / "t.jsonl").write_text(json.dumps(record))
    with pytest.raises(
        mp.errors.TraceError,
        match=rf"{place}\[0\]\.modality: is audio, which .* does not hear.*MM011",
    ):
        list(read_trace(tmp_path / "t.jsonl"))
    sample = full_sample()
    getattr(sample, place)[0].modality = "audio"
    assert "MM011" in {p.code for p in mp.validate(sample)}
    with pytest.raises(mp.SchemaError, match="MM011"):
        mp.pack([sample])


def test_no_framework_is_handed_a_sample_without_its_audio():
    from mmpack.adapters.checks import check_samples

    check_samples([heard()], None)
    with pytest.raises(mp.SchemaError, match=r"from_samples: .*MM407"):
        check_samples([heard(audio())], None)
