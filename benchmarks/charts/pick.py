"""What charts share: rows of a report by what they measure, and figures as they are written."""

from __future__ import annotations

from typing import Any

from charts.draw import Bar, Group

Row = dict[str, Any]


def cases(rows: list[Row], *names: str) -> dict[tuple[Any, ...], list[Row]]:
    """Rows by the values of some columns, in their order; without those that did not run."""
    out: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        if "did_not_run" not in row:
            out.setdefault(tuple(row.get(name) for name in names), []).append(row)
    return out


def one(rows: list[Row], **values: Any) -> Row:
    """The first row of these values. Raises: ValueError: there is none."""
    for row in rows:
        if all(row.get(name) == v for name, v in values.items()):
            return row
    raise ValueError(f"a report has no row of {values}. Fix: run its benchmark with its defaults")


def digits(value: float) -> str:
    """Three of them."""
    if value >= 99.95:
        return f"{value:,.0f}"
    return (
        f"{value:.1f}" if value >= 9.995 else f"{value:.2f}" if value >= 0.0995 else f"{value:.2g}"
    )


def fraction(value: float) -> str:
    return f"{value:.2f}" if value >= 0.01 else f"{value:.2g}"


def milliseconds(value: float) -> str:
    return f"{digits(value)} ms"


def microseconds(value: float) -> str:
    return f"{digits(value)} µs" if value < 9995 else milliseconds(value / 1e3)


def memory(size: float) -> str:
    return f"{digits(size / 1e9)} GB" if size >= 1e8 else f"{digits(size / 1e6)} MB"


def of_best(rows: list[Row], column: str) -> Row:
    return min(rows, key=lambda row: row[column])


def shares(title: str, rows: list[Row], column: str, kinds: dict[str, str], time: str) -> Group:
    """Bars of a share, 1 is all, with the time beside it; `kinds` gives the kind of a bar by who it is of."""
    bars = [
        Bar(row["who"], row[column], f"{fraction(row[column])} · {milliseconds(row[time])}", kind)
        for row in rows
        if (kind := kinds.get(row["who"], "peer")) != "left out"
    ]
    return Group(title, bars)
