"""Pictures and clips: each is encoded once, the tower's attention is the same in one launch, and frames are seen."""

from __future__ import annotations

import unittest.mock
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from conformance.agree import as_exact_as_separate, close, expect, same
from conformance.checks.packing import tower_names
from conformance.oracle import logprobs_and_gradients
from conformance.subject import Subject

from mmpack.adapters.transformers import attach, inputs, packed_logprobs
from mmpack.packing.pack import pack
from mmpack.packing.pad import pad
from mmpack.versions import takes_encoded_media


def tower(subject: Subject) -> None:
    """Attached and not; each medium once, and pixels repeated as a forward needs them that takes no encoded media."""
    model, samples = subject.model, subject.samples
    (wanted, gradients), (_, apart) = subject.exact, subject.separate
    names = tower_names(subject, gradients)
    idle = [n for n in names if n.endswith("weight") and not (gradients[n] != 0).any()]
    expect(bool(names) and not idle, f"weights of the tower without a gradient: {idle}")
    with torch.no_grad():
        with attach(model, text=False):
            close(packed_logprobs(model, pad(samples)), wanted, "attach(text=False), padded")
        with attach(model, tower="keep"):
            close(packed_logprobs(model, pack(samples)), wanted, "attach(tower='keep'), packed")
    batch = pack(samples)
    with attach(model):
        if takes_encoded_media(model):
            with torch.no_grad():
                close(packed_logprobs(model, batch), wanted, "each medium once")
            ran, distinct = batch.stats["patches_encoded"], sum(m.num_patches for m in batch.media)
            expect(ran == distinct, f"{ran} patches ran, the distinct media have {distinct}")
        with unittest.mock.patch.object(inputs, "takes_encoded_media", lambda model: False):
            values, found = logprobs_and_gradients(model, batch)
    close(values, wanted, "pixels repeated")
    as_exact_as_separate(found, apart, gradients, "pixels repeated")
    ran = batch.stats["patches_encoded"]
    seen = [i for i in batch.media_order if batch.media[i].modality != "audio"]
    heard = {i for i in batch.media_order if batch.media[i].modality == "audio"}  # by no forward
    occurring = sum(batch.media[i].num_patches for i in (*seen, *heard))
    expect(ran == occurring, f"pixels repeated: {ran} patches ran, {occurring} occur")


def video(subject: Subject) -> None:
    """A clip that is drawn otherwise changes what is after it and nothing else; its frames are laid out as upstream.

    The last of families whose frames mmpack chooses; others' clips are taken as their processor made them.
    """
    model, samples = subject.model, subject.samples
    expect(subject.kit.video is not None, "the kit draws no clip: Kit.video, or Kit.lacks")
    wanted, _ = subject.exact
    with torch.no_grad(), attach(model):
        batch = pack(samples, share_prefix=True)
        close(packed_logprobs(model, batch), wanted, "shared")
        others = [_other_frames(s) for s in samples]
        changed = pack(others, share_prefix=True)
        found = changed.unpack_loss(packed_logprobs(model, changed))
    before = batch.unpack_loss(wanted)
    for sample, a, b in zip(samples, found, before, strict=True):
        clips = [s for s in sample.modality_spans if s.modality == "video"]
        ends = clips[-1].stop if clips else len(sample)
        after = torch.from_numpy(sample.loss_indices > ends)
        off = (a.double() - b).abs()
        where = f"sample {sample.sample_id}, other frames"
        if bool(after.any()):
            expect(float(off[after].max()) > 1e-4, f"{where}: nothing after them changed")
        if not bool(after.all()):
            expect(float(off[~after].max()) <= 1e-5, f"{where}: what is before them changed")
    if subject.kit.processor is not None and subject.family.video_policies:
        frames_of_processor(subject)


def _other_frames(sample: Any) -> Any:
    media = [
        replace(m, pixel_values=-m.pixel_values, cache_key=m.cache_key[::-1])
        if m.modality == "video"
        else m
        for m in sample.media
    ]
    return replace(sample, media=media)


def frames_of_processor(subject: Subject) -> None:
    """Six frames, two per second, in a message: ids as transformers' processor writes them."""
    import transformers

    frames = np.random.default_rng(9).integers(0, 256, (6, 64, 96, 3), dtype=np.uint8)
    about: dict[str, Any] = {
        "fps": 4.0,
        "frames_indices": np.arange(0, 12, 2),
        "total_num_frames": 12,
    }
    content = [{"type": "video", "video": (frames, about)}, {"type": "text", "text": "Which?"}]
    sample = subject.wrapped([{"role": "user", "content": content}], sample_id="s")
    hf = subject.processor
    plain = [{"role": "user", "content": [{"type": "video"}, content[1]]}]
    text = hf.apply_chat_template(plain, tokenize=False, add_generation_prompt=True)
    metadata = transformers.video_utils.VideoMetadata(**about)
    wanted = hf(
        text=[text],
        videos=[torch.from_numpy(frames).permute(0, 3, 1, 2)],
        videos_kwargs={"do_sample_frames": False, "video_metadata": [metadata]},
        return_tensors="pt",
    )
    same(sample.input_ids, wanted["input_ids"][0], "input_ids of a clip")
