"""The page of `mmpack smoke --html`: parity of the run, with its pictures, its text and the drift of its logprobs."""

from __future__ import annotations

from typing import Any

import numpy as np

from mmpack.layout.fingerprint import content_hash
from mmpack.processors.messages import parts_of
from mmpack.view import html


def page(job: Any) -> str:
    """The parity report of a job that has run, as one self-contained page."""
    pictures: dict[str, np.ndarray] = {}
    for messages in job.messages:
        for kind, item in parts_of(messages, None):
            if kind == "image":
                pixels, _ = job.processor.rgb_pixels(item, "smoke")
                pictures[content_hash("image", pixels)] = pixels
            else:
                clip = job.processor.clip(item, "smoke")
                pictures[clip.content_hash] = clip.frames
    logprobs = {}
    if hasattr(job, "old_logprobs"):  # parity held, so they were computed
        ends = np.cumsum([s.num_loss_tokens for s in job.train])[:-1]
        pieces = np.split(job.old_logprobs.numpy(), ends)
        logprobs = {s.sample_id: lp for s, lp in zip(job.train, pieces, strict=True)}
    return html(
        job.parity,
        pictures=pictures,
        decode=job.hf_processor.tokenizer.decode,
        train_logprobs=logprobs,
    )
