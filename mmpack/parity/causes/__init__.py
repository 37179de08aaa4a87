"""What made two samples differ: one file per part of the layout; each returns `Hit`s with evidence.

A recogniser never guesses. A difference that it sees but can't explain is a hit of cause `unknown`.
"""

from __future__ import annotations

from mmpack.parity.causes.loss import loss_hits
from mmpack.parity.causes.media import media_hits
from mmpack.parity.causes.pair import Decode, Hit, Pair
from mmpack.parity.causes.positions import position_hits
from mmpack.parity.causes.rules import broken_rules, rule_hits
from mmpack.parity.causes.runs import run_hits
from mmpack.parity.causes.settings import setting_hits
from mmpack.parity.causes.text import text_hits

__all__ = ["Decode", "Hit", "Pair", "broken_rules", "hits_of", "rule_hits"]


def hits_of(pair: Pair, decode: Decode | None = None) -> list[Hit]:
    """Every cause that the two samples give evidence of, and every difference that none explains."""
    media = media_hits(pair, decode)
    hits = media + run_hits(pair) + text_hits(pair, media, decode) + loss_hits(pair)
    return hits + position_hits(pair, media) + setting_hits(pair)
