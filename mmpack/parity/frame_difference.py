"""Where the frames of two videos differ: the first such frame, its time, what chose it. Times: seconds."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from mmpack.schema.media import Medium

SHOWN = 8  # settings named in one sentence


@dataclass(frozen=True)
class Frame:
    """One side's frame at the place where the two differ.

    `index` counts frames of the file, `timestamp` is the recorded one, else index / fps where these were recorded, and
    `time` the same as m:ss.mmm; None where the side has fewer frames, or recorded none. `frames`: how many it chose.
    `policy`: of `processor["video"]["sampling"]`.
    """

    media_index: int
    frames: int | None = None
    index: int | None = None
    timestamp: float | None = None
    time: str | None = None
    policy: str | None = None

    def __str__(self) -> str:
        if self.index is None and self.timestamp is None:
            return "none"
        parts = [] if self.index is None else [f"frame {self.index}"]
        parts += [] if self.timestamp is None else [f"at {self.time}"]
        return " ".join(parts)


@dataclass(frozen=True)
class FrameDifference:
    """The first frame by which two videos differ.

    `by`: what differs, `frame_indices`, `frame_timestamps` or `content_hash`. `place`: in the list of frames, from 0;
    None if only the hash of all frames is there. `differing`: places at which the lists differ, what one side has more
    included. `settings`: of the two policies, those that differ (rollout, train; None: it has no such setting).
    """

    by: str
    place: int | None
    differing: int | None
    rollout: Frame
    train: Frame
    settings: dict[str, tuple[Any, Any]] = field(default_factory=dict)

    def __str__(self) -> str:
        sides = (("rollout", self.rollout), ("train", self.train))
        parts = []
        if self.place is not None:
            one, two = str(self.rollout), str(self.train)
            if one == two:  # equal to a millisecond
                one, two = (f"{frame} ({frame.timestamp!r} s)" for _, frame in sides)
            parts.append(f"frames[{self.place}] is the first to differ: rollout {one}, train {two}")
            counts = [n for n in (self.rollout.frames, self.train.frames) if n is not None]
            parts.append(f"{self.differing} of {max(counts)} differ")
        policies = [frame.policy for _, frame in sides]
        if policies[0] == policies[1] is not None:
            parts.append(f"policy {policies[0]} on both sides")
        elif any(policies):
            named = [f"{name} {frame.policy or 'not recorded'}" for name, frame in sides]
            parts.append(f"policy: {', '.join(named)}")
        settings = self.settings
        if policies[0] != policies[1]:  # each has settings of its own
            settings = {name: both for name, both in settings.items() if None not in both}
        parts += [
            f"{name}: rollout {_shown(a)}, train {_shown(b)}"
            for name, (a, b) in list(settings.items())[:SHOWN]
        ]
        more = len(settings) - SHOWN
        return "; ".join(parts + ([f"and {more} more settings"] if more > 0 else []))


def sampling_of(processor: Any, medium: Medium) -> dict[str, Any]:
    """Policy and settings of a video: its own, else those of `Sample.processor`; empty where none were recorded."""
    own = medium.metadata.get("sampling")
    if isinstance(own, dict):
        return own
    video = processor.get("video") if isinstance(processor, dict) else None
    found = video.get("sampling") if isinstance(video, dict) else None
    return found if isinstance(found, dict) else {}


def clock(seconds: float) -> str:
    """Seconds as m:ss.mmm; minutes go on beyond 59."""
    whole = round(abs(seconds) * 1000)
    sign = "-" if seconds < 0 and whole else ""
    minutes, rest = divmod(whole, 60_000)
    return f"{sign}{minutes}:{rest // 1000:02d}.{rest % 1000:03d}"


def known(seconds: float | None) -> float | None:
    """None for what is no time: samples made by hand may hold NaN."""
    return None if seconds is None or not math.isfinite(seconds) else float(seconds)


def _shown(value: Any) -> str:
    text = "none" if value is None else str(value)
    return text if len(text) <= 48 else f"{text[:45]}..."
