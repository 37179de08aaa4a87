"""Causes by which two samples differ: one file per part of the layout; each returns `Hit`s with evidence.

A recogniser never guesses. A difference that it sees but can't explain is a hit of cause `unknown`.
"""

from __future__ import annotations

from dataclasses import replace

from mmpack.parity.causes.codecs import codec_hits
from mmpack.parity.causes.coordinates import coordinate_hits
from mmpack.parity.causes.cut import common_part, cut_hits, edges, moved, truncation
from mmpack.parity.causes.loss import loss_hits
from mmpack.parity.causes.media import media_hits
from mmpack.parity.causes.pair import Decode, Hit, Pair
from mmpack.parity.causes.positions import position_hits
from mmpack.parity.causes.replay import replay_hits
from mmpack.parity.causes.runs import broken_rules, rule_hits, run_hits, structured_pair
from mmpack.parity.causes.settings import limits_fix, setting_hits
from mmpack.parity.causes.text import text_hits
from mmpack.parity.causes.turns import turns_in_order

__all__ = ["Decode", "Hit", "Pair", "broken_rules", "hits_of", "rule_hits", "structured_pair"]


def hits_of(pair: Pair, decode: Decode | None = None) -> list[Hit]:
    """Every cause that the two samples give evidence of, and every difference that none explains.

    Padding, BOS and what was cut off say nothing more: what both sides have is compared by itself.
    """
    around = edges(pair)
    inner = _of_ids(around.inner, decode, recounted=around.shift)
    hits = [*around.hits, *map(around.moved, inner), *setting_hits(pair)]
    hits += coordinate_hits(pair) + replay_hits(pair)
    limits = limits_fix(pair) if any(hit.cause == "max_pixels" for hit in hits) else ""
    return [replace(hit, fix=limits) if hit.cause == "max_pixels" else hit for hit in hits]


def _of_ids(pair: Pair, decode: Decode | None, recounted: bool) -> list[Hit]:
    if not truncation(pair) and (found := turns_in_order(pair)):
        hits, ordered = found
        rest = _in_order(ordered, decode, recounted)
        return hits + rest + position_hits(pair, rest, recounted)
    return _in_order(pair, decode, recounted)


def _in_order(pair: Pair, decode: Decode | None, recounted: bool) -> list[Hit]:
    if cut := truncation(pair):
        rest = _hits(common_part(pair, cut), decode, recounted or cut.at_left)
        return cut_hits(pair, cut) + [moved(hit, pair, cut) for hit in rest]
    return _hits(pair, decode, recounted)


def _hits(pair: Pair, decode: Decode | None, recounted: bool) -> list[Hit]:
    """`recounted`: an offset of all positions follows from what was cut off before them."""
    media = media_hits(pair, decode)
    runs = run_hits(pair, media)
    if len(pair.left) != len(pair.right):  # what is cut through a medium was cut
        runs += [
            replace(hit, cause="truncated", field="input_ids")
            for hit in runs
            if hit.cause == "truncated_medium"
        ]
    hits = media + runs + text_hits(pair, media, decode) + loss_hits(pair) + codec_hits(pair)
    return hits + position_hits(pair, media, recounted)
