"""`from_records`: requests to an engine, and rows that frameworks make of them, as one trajectory.

A record has a prompt [P] and a response [R], with a mask of what the policy sampled. Each run of 1 is a turn.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from mmpack.errors import ArgumentError, check_flag, check_name, kind_of
from mmpack.layout.occurrences import occurring_media
from mmpack.layout.runs import true_runs
from mmpack.processors.arguments import as_ids, check_names
from mmpack.processors.wrap import Processor
from mmpack.schema.media import Medium
from mmpack.schema.ragged import Ragged
from mmpack.schema.sample import Sample
from mmpack.schema.spans import LossSpan, PolicyVersion, Score
from mmpack.trajectory.branching import PARTED, branches
from mmpack.trajectory.record_columns import (
    Routes,
    full_routes,
    lists_of,
    mask_of,
    media_in,
    rewards_of,
    values_of,
    versions_of,
)
from mmpack.trajectory.samples import linked
from mmpack.trajectory.trajectory import (
    SETTABLE,
    Trajectory,
    Turn,
    begins_with,
    made_with,
    same_context,
)

RESAMPLED = ("both", "last")


@dataclass(eq=False)
class Record:
    """One request with one completion, or one row of several turns, of an episode. R counts the response's ids."""

    prompt_ids: Any  # int [P]
    response_ids: Any  # int [R]: sampled ids, and what came between them
    mask: Any = None  # 0/1 [R], 1 where the policy sampled and the loss reads; None: everywhere
    # of prompt and response, in order, as `processor.from_ids` takes them
    media: Sequence[Any] = ()
    logprobs: Any = None  # float [R], anything where mask is 0
    # the name of the weights, or [start, stop, name] of each run of ids
    policy_versions: str | int | Sequence[Any] | None = None
    kept_ids: Any = None  # R lists of ids, or a Ragged of them
    teachers: Mapping[str, Ragged] | None = None  # R scored lists each
    # int [n, layers, k]: routes of tokens [routes_start, routes_start + n), prompt and response; ids expanded
    routed_experts: Any = None
    routes_start: int = 0
    rewards: Any = None  # a number: of the last turn; float [R]: of tokens
    turn_rewards: Any = None  # a number per turn, in place of `rewards`
    score: str = "reward"  # name of either
    finish_reason: str | None = None
    prefix_cached_tokens: int | None = None
    source: str = "environment"  # who wrote what is new in the prompt
    request: Hashable = None  # equal: completions of one request; None: a request of its own
    metadata: dict[str, Any] = field(default_factory=dict)


class _Row(NamedTuple):
    """A record, checked."""

    prompt: np.ndarray  # int64 [P]
    response: np.ndarray  # int64 [R], up to the last sampled id
    runs: list[tuple[int, int]]  # sampled ids of the response, a turn each
    media: list[Medium]
    logprobs: np.ndarray | None  # [R]


def from_records(
    records: Sequence[Record],
    processor: Processor,
    *,
    trajectory_id: str,
    group_id: str,
    expanded: bool = True,
    resampled: str = "both",
    num_experts: int | None = None,
    **fields: Any,
) -> Trajectory:
    """The tree of an episode: nothing is encoded again, and nothing is glued where ids do not agree.

    A prompt that begins with an earlier prompt and what was sampled there goes on from it; other prompts branch off
    (see `branches`). Rows that were cut out of a tree may repeat turns: a run with the history,
    ids, media and logprobs of an earlier record's is that turn, unless both end their records (two completions that
    happen to be equal). A row whose mask is 0 throughout is a turn without loss.

    Args:
        records: in the order in which they were sampled.
        processor: `mp.wrap_processor` of the model's processor.
        expanded: whether ids hold a picture once per vision token, or once.
        resampled: of one prompt that was sent in several requests, "both": each answer is loss; "last": the answers of
            the last request are, and those that a later prompt goes on from. The others stay as turns without loss.
        num_experts: of each layer; it decides the dtype of routes. None: uint8 where all ids are below 256.
        fields: rewards, costs, verifiers, sampling, metadata of Trajectory.

    What comes after the last sampled id of a record is cut. A turn whose context parts from the history says so in
    `metadata["parts"]`, as `Branch.to_dict` does. Raises: ArgumentError; LayoutError where placeholders and media
    contradict each other.

    Example:
        >>> import mmpack as mp
        >>> from mmpack.demo.qwen_processor import qwen_vl_processor
        >>> from mmpack.trajectory import Record, from_records, to_samples
        >>> processor = mp.wrap_processor(qwen_vl_processor("qwen2_5_vl"))
        >>> calls = [Record([1, 2], [3, 4]), Record([1, 2, 3, 4, 5], [6]), Record([1, 2], [7])]
        >>> episode = from_records(calls, processor, trajectory_id="e", group_id="task")
        >>> [(s.input_ids.tolist(), s.loss_indices.tolist()) for s in to_samples(episode)]
        [([1, 2, 3, 4, 5, 6], [2, 3, 5]), ([1, 2, 7], [2])]
    """
    check_names(fields, SETTABLE, "from_records", "Trajectory")
    check_name("from_records", "resampled", resampled, RESAMPLED)
    if isinstance(records, Mapping | str | bytes) or not isinstance(records, Sequence):
        what = kind_of(records)
        raise ArgumentError(f"from_records: records is {what}, expected a list. Fix: pass Records")
    if not records:
        raise ArgumentError(
            "from_records: records is empty. Fix: leave out episodes without an answer"
        )
    where = f"from_records: {trajectory_id!r:.60}"
    named = {f"{where}: records[{i}]": record for i, record in enumerate(records)}
    made = _made(named, processor, expanded, num_experts)
    made = after_what_they_go_on_from(made)
    if resampled == "last":
        replace_resampled(made, records)
    turns = [m.turn for m in made]
    trajectory = made_with(processor, trajectory_id, group_id, turns, fields)
    for branch in branches(trajectory):
        if branch.kind in PARTED:
            trajectory.turns[branch.turn].metadata["parts"] = branch.to_dict()
    return trajectory


def _made(
    records: Mapping[str, Record],
    processor: Processor,
    expanded: bool,
    num_experts: int | None,
) -> list[Made]:
    """Return the turns of records, in their order, each once. Args: `records`: by what begins errors about one."""
    check_flag("from_records", "expanded", expanded)
    if not hasattr(processor, "family"):
        raise ArgumentError(
            f"from_records: processor is {kind_of(processor)}. Fix: pass mp.wrap_processor of the model's processor"
        )
    known: dict[int, list[Medium]] = {}
    rows = [_row(r, processor, known, expanded, where) for where, r in records.items()]
    history = _history(rows, processor)
    made: list[Made] = []
    for i, ((where, record), row) in enumerate(zip(records.items(), rows, strict=True)):
        sample = _laid_out(row, processor, history, expanded, where)
        for k, turn in enumerate(_turns(record, row, sample, made, num_experts, where)):
            last = k == len(row.runs) - 1
            if not repeats(turn, i, last, made):
                made.append(Made(turn, i, last))
    return made


def _row(
    record: Record,
    processor: Processor,
    known: dict[int, list[Medium]],
    expanded: bool,
    where: str,
) -> _Row:
    if not isinstance(record, Record):
        raise ArgumentError(f"{where} is {kind_of(record)}. Fix: pass a Record")
    prompt, response = (
        as_ids(getattr(record, name), processor.vocab_size, f"{where}: {name}")
        for name in ("prompt_ids", "response_ids")
    )
    if not len(prompt) or not len(response):
        part = "response_ids" if len(prompt) else "prompt_ids"
        raise ArgumentError(f"{where}: {part} is empty. Fix: leave out records without an answer")
    if isinstance(record.media, Mapping | str | bytes) or not isinstance(record.media, Sequence):
        what = kind_of(record.media)
        raise ArgumentError(f"{where}: media is {what}, expected a list. Fix: pass a list")
    media = []
    for item in record.media:  # one object, one look at its pixels
        if id(item) not in known:
            known[id(item)] = processor.media_from([item])
        media += known[id(item)]
    mask = np.ones(len(response), bool) if record.mask is None else record.mask
    sampled = mask_of(where, mask, len(response))
    values = values_of(where, record.logprobs, len(response))
    if not sampled.any():
        return _Row(prompt, response, [(0, len(response))], media, values)
    stop = int(np.flatnonzero(sampled)[-1]) + 1
    before = np.concatenate([prompt, np.where(sampled, 0, response)[:stop]])
    if stop < len(response):
        media = media_in(before, media, processor.family, expanded)
    return _Row(prompt, response[:stop], true_runs(sampled), media, values)


def _turns(
    record: Record,
    row: _Row,
    sample: Sample,
    made: list[Made],
    num_experts: int | None,
    where: str,
) -> list[Turn]:
    """The turns of a record, with what it says of each. `sample`: its ids with media at their placeholders."""
    count = len(record.response_ids)
    kept = lists_of(record.kept_ids, count, "kept_ids", where)
    teachers = {
        name: lists_of(own, count, f"teachers[{name!r:.40}]", where, scored=True)
        for name, own in (record.teachers or {}).items()
    }
    versions = versions_of(record.policy_versions, count, where)
    rewards = rewards_of(record, row.runs, count, where)
    loss = record.mask is None or bool(np.any(record.mask))
    spans = sample.loss_spans[-len(row.runs) :]
    routes = Routes.of(record, num_experts, where)
    if routes is not None:
        routes = full_routes(routes, sample, spans[0].start, [m.turn for m in made], where)
    out = []
    for k, ((a, b), span) in enumerate(zip(row.runs, spans, strict=True)):
        start, last = span.start, k == len(row.runs) - 1
        if kept is not None and loss and not kept.lengths[a:b].all():
            raise ArgumentError(
                f"{where}: kept_ids is empty at response id {a + kept.lengths[a:b].argmin()}, which was sampled. "
                "Fix: pass the ids that the sampler left there"
            )
        out.append(
            Turn(
                sample.input_ids[:start],
                sample.input_ids[start : span.stop],
                occurring_media(sample, start),
                None if row.logprobs is None else row.logprobs[a:b],
                source=record.source,
                loss_spans=None if loss else [],
                finish_reason=record.finish_reason if last else None,
                policy_versions=[
                    PolicyVersion(start + max(s, a) - a, start + min(e, b) - a, name)
                    for s, e, name in versions
                    if max(s, a) < min(e, b)
                ]
                or None,
                prefix_cached_tokens=None if k else record.prefix_cached_tokens,
                kept_ids=None if kept is None else kept[a:b],
                teachers={n: own[a:b] for n, own in teachers.items() if own is not None} or None,
                routed_experts=None if routes is None else routes.cut(span.stop, where),
                rewards=[
                    Score(s.name, s.value, s.scope)
                    if at is None
                    else Score(s.name, s.value, {"span": [start + at - a, start + at - a + 1]})
                    for s, at in rewards[k]
                ]
                or None,
                metadata=dict(record.metadata) if last else {},
            )
        )
    return out


def _history(rows: Sequence[_Row], processor: Processor) -> list[Turn]:
    """All turns by their ids alone, the shortest first, if a placeholder was sampled: it stands for no medium."""
    pads = list(processor.family.placeholder_ids.values())
    turns = [
        (np.concatenate([row.prompt, row.response[:a]]), row.response[a:b])
        for row in rows
        for a, b in row.runs
    ]
    if not any(np.isin(answer, pads).any() for _, answer in turns):
        return []
    return sorted((Turn(*turn) for turn in turns), key=len)


def _laid_out(
    row: _Row, processor: Processor, history: list[Turn], expanded: bool, where: str
) -> Sample:
    """Prompt and response with media at their placeholders. Its last loss spans are the runs of the row."""
    ids, start = np.concatenate([row.prompt, row.response]), len(row.prompt)
    spans = [LossSpan(start + a, start + b) for a, b in row.runs]
    if history:
        sampled = linked([*history, Turn(row.prompt, row.prompt[:0])])[-1].sampled[:start]
        spans = [*(LossSpan(a, b) for a, b in true_runs(sampled)), *spans]
    return processor.from_ids(ids, row.media, bool(expanded), spans, sample_id=where)


# ---- which turns are one turn -----------------------------------------------------------------------


class Made(NamedTuple):
    """A turn, and where it comes from."""

    turn: Turn
    record: int
    last: bool  # of its record


def after_what_they_go_on_from(made: list[Made]) -> list[Made]:
    """Return turns in their order, but none before the turn that it goes on from.

    Frameworks list chains by their last answer.
    """
    out: list[Made] = []
    waiting = list(made)
    while waiting:
        first = waiting[0]
        while True:
            parent = _longest_history(first.turn, [m for m in waiting if m is not first])
            if parent is None or _longest_history(first.turn, [*out, parent]) is not parent:
                break
            first = parent
        out.append(first)
        waiting = [m for m in waiting if m is not first]
    return out


def _longest_history(turn: Turn, among: list[Made]) -> Made | None:
    """The longest of the turns that `turn` goes on from; of equal ones the first."""
    found = [m for m in among if begins_with(turn.context_ids, turn.media, m.turn)]
    return max(found, key=lambda m: len(m.turn), default=None)


def repeats(turn: Turn, record: int, last: bool, made: list[Made]) -> bool:
    """Return whether another record has this turn already."""
    for other in made:
        if other.record == record or (last and other.last):
            continue
        own, before = turn.logprobs, other.turn.logprobs
        if (
            np.array_equal(turn.response_ids, other.turn.response_ids)
            and same_context(turn, other.turn)
            and (own is None or before is None or np.array_equal(own, before))
        ):
            return True
    return False


def replace_resampled(made: list[Made], records: Sequence[Record]) -> None:
    """Take the loss off answers whose prompt was sent again, unless a later prompt goes on from them."""
    nodes = linked([m.turn for m in made])
    parents = {k for node in nodes for k in node.path[:-1]}
    for k, m in enumerate(made):
        again = [j for j in range(k + 1, len(made)) if _sent_again(m, made[j], records)]
        if not again or k in parents:
            continue
        note: dict[str, Any] = {"by": again[-1]}
        if m.turn.rewards:
            note["rewards"] = [[s.name, s.value] for s in m.turn.rewards]
        m.turn.loss_spans, m.turn.rewards = [], None
        m.turn.metadata["replaced"] = note


def _sent_again(first: Made, second: Made, records: Sequence[Record]) -> bool:
    requests = [records[m.record].request for m in (first, second)]
    same = first.record == second.record or (requests[0] is not None and requests[0] == requests[1])
    return not same and same_context(first.turn, second.turn)
