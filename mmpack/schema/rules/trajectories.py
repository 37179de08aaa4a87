"""MM213 and MM214: samples of one trajectory, over a whole trace. No rule of one sample."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from mmpack.schema.codes import Found
from mmpack.schema.sample import Sample
from mmpack.schema.spans import LossSpan
from mmpack.schema.turns import span_turns

CODES = ("MM213", "MM214")


class Trajectories:
    """The trajectories of a trace as far as it was read. Memory: one digest per loss span."""

    def __init__(self) -> None:
        self.groups: dict[str, str] = {}  # trajectory -> its group
        self.scored: dict[tuple[str, int | None, bytes], str] = {}  # loss span -> its sample

    def problems(self, sample: Sample) -> Found:
        """Problems of this sample together with the earlier ones. `sample` has no fault of structure."""
        name = sample.trajectory_id
        if name is None:
            return
        group = self.groups.setdefault(name, sample.group_id)
        if group != sample.group_id:
            message = f"{name!r:.40} is of group {group!r:.40} in a sample before, here of {sample.group_id!r:.40}"
            yield "MM214", "trajectory_id", message, None
            return
        turns = span_turns(sample)
        for i, span, digest in _beginnings(sample):
            key = (name, turns[i], digest)
            other = self.scored.setdefault(key, sample.sample_id)
            if other != sample.sample_id:
                message = f"begins with a token that is loss in {other!r:.60} too"
                yield "MM213", f"loss_spans[{i}]", message, (span.start, span.stop)


def _beginnings(sample: Sample) -> Iterator[tuple[int, LossSpan, bytes]]:
    """Each loss span with a digest of all ids up to its first token, and of the media in them."""
    ids, keys, done = hashlib.sha256(), hashlib.sha256(), 0
    media = iter(sample.modality_spans)
    medium = next(media, None)
    for i, span in enumerate(sample.loss_spans):
        if not done <= span.start < span.stop <= len(sample):
            continue  # empty, or MM201 says what is wrong
        ids.update(sample.input_ids[done : span.start + 1].astype("<i8").tobytes())
        done = span.start + 1
        while medium is not None and medium.start < done:
            if medium.media_index < len(sample.media):
                keys.update(sample.media[medium.media_index].cache_key.encode("utf-8", "replace"))
            medium = next(media, None)
        yield i, span, ids.digest() + keys.digest()
