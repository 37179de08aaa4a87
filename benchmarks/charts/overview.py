"""One chart of all pages: how many times as fast as the fastest other, and how near to the floor."""

from __future__ import annotations

from charts.draw import Bar, Chart, Group, Headline, Panel
from charts.pick import digits


def overview(headlines: list[Headline]) -> Chart:
    faster = sorted((h for h in headlines if h.faster is not None), key=lambda h: -(h.faster or 0))
    shares = sorted((h for h in headlines if h.share is not None), key=lambda h: -(h.share or 0))
    return Chart(
        "How fast is mmpack beside others, and beside what is possible?",
        [
            Panel(
                "times as fast, log; longer is faster",
                [Group("", [_faster(h) for h in faster])],
                log=True,
                ratios=True,
                mark=(1, "as fast as the fastest other measured"),
            ),
            Panel(
                "share of the floor's rate; longer is faster",
                [Group("", [_share(h) for h in shares])],
                mark=(1, "the floor"),
            ),
        ],
        "The chart shows one to four cases from most pages; each page has all of its cases. Where the other measured "
        "code is faster, the case is marked as missed.",
    )


def _faster(line: Headline) -> Bar:
    found = line.faster or 0.0
    kind = "own" if found >= 1 else "missed"
    return Bar(line.what, found, f"{digits(found)} × {line.peer}", kind)


def _share(line: Headline) -> Bar:
    found = line.share or 0.0
    return Bar(line.what, found, f"{found:.2f} · {line.floor}", "own")
