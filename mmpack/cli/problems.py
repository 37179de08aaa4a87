"""A broken rule as JSON, the same for every command that lists some."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mmpack.schema.rules import Problem


def problem_document(problem: Problem) -> dict[str, Any]:
    """The problem's fields and its fix; `span` is [start, stop) in tokens, or null."""
    return {
        "code": problem.code,
        "sample_id": problem.sample_id,
        "field": problem.field,
        "message": problem.message,
        "span": None if problem.span is None else list(problem.span),
        "fix": problem.fix,
    }
