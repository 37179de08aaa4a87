"""TransferQueue: samples put column by column as they are produced, and taken by whoever plans and packs.

A partition holds rows by sample_id. Columns are those of `to_tensordict(samples, jagged=True)`: arrays cross to the
storage as they lie in memory. `transfer_queue.init()` comes first, in each process.

Run with TransferQueue 0.1.11.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mmpack.adapters.sample_columns import (
    HELD,
    PARTS,
    RECORD,
    TEACHER,
    field_columns,
    from_columns,
    plain_value,
)
from mmpack.errors import ArgumentError, check_whole, kind_of, needs
from mmpack.schema.fields import Records
from mmpack.schema.jsonl import dump_json, parse_json
from mmpack.schema.ragged import RaggedSpec
from mmpack.schema.sample import Sample, as_samples
from mmpack.schema.specs import Str

with needs("transferqueue", __name__):
    import transfer_queue
    from tensordict import TensorDict

from mmpack.adapters.tensordict import rows_of, stacked_column, to_tensordict, turned


def put(samples: Sequence[Sample], partition: str) -> int:
    """Write samples, each under its sample_id, and return how many. A sample that is there is written over.

    Each row's tag says `group_id`, `tokens`, `loss_tokens` and `patches`: `transfer_queue.kv_list` shows them without
    the data. Raises: ArgumentError, TraceError.
    """
    given = as_samples(samples, "put")
    if given:
        transfer_queue.kv_batch_put(
            keys=_ids("put", [s.sample_id for s in given]),
            partition_id=partition,
            fields=to_tensordict(given, jagged=True),
            tags=[_tag(s) for s in given],
        )
    return len(given)


def put_columns(
    sample_ids: Sequence[str], partition: str, columns: Mapping[str, Sequence[Any]]
) -> None:
    """Write more columns of samples, such as rewards that were computed later: a value per sample_id.

    A name that is a field of Sample (`rewards`, `rollout_logprobs`, `kept_ids`, …; one teacher is `teachers.NAME`) has
    values as the field has them, and stands in for what was put before. Any other name is a column of your own:
    numbers, arrays, tensors or texts.

    Raises: ArgumentError for other counts, and for sample_ids that the partition does not have; TraceError.
    """
    ids = _ids("put_columns", sample_ids)
    made: dict[str, Any] = {}
    for name, values in columns.items():
        if len(values) != len(ids):
            raise ArgumentError(
                f"put_columns: {name} has {len(values)} values for {len(ids)} samples. Fix: pass one for each"
            )
        encoded = [_encoded(name, v, f"put_columns: {ids[i]}") for i, v in enumerate(values)]
        made |= {c: stacked_column([row[c] for row in encoded]) for c in (encoded or [{}])[0]}
    if ids and made:
        _meta("put_columns", ids, partition)
        fields = TensorDict(made, batch_size=[len(ids)])
        transfer_queue.kv_batch_put(keys=ids, partition_id=partition, fields=fields)


def get(
    sample_ids: Sequence[str], partition: str, columns: Sequence[str] = ()
) -> tuple[list[Sample], dict[str, list[Any]]]:
    """Samples by id, with the fields that they were put with, and those of `columns` that came later.

    Args:
        columns: fields of Sample, or columns of your own, which come back as lists with the samples.

    Raises: ArgumentError for what is not there; TraceError.
    """
    ids = _ids("get", sample_ids)
    own: dict[str, list[Any]] = {c: [None] * len(ids) for c in columns if not _is_field(c)}
    if not ids:
        return [], own
    later = [c for name in columns for c in _columns_of(name)]
    # rows with one set of columns come together: the queue leaves out a column that only some have
    sets: dict[tuple[str, ...], list[int]] = {}
    for i, row in enumerate(_read("get", ids, partition, [RECORD])):
        names = parse_json(row[RECORD], f"get: {ids[i]}")[HELD]
        sets.setdefault(tuple(dict.fromkeys([RECORD, *names, *later])), []).append(i)
    samples: list[Any] = [None] * len(ids)
    for wanted, members in sets.items():
        rows = _read("get", [ids[i] for i in members], partition, list(wanted))
        for i, row in zip(members, rows, strict=True):
            samples[i] = from_columns(row, f"get: {ids[i]}")
            for name, values in own.items():
                values[i] = row[name]
    return samples, own


def take(
    partition: str, count: int, task: str, columns: Sequence[str] = ()
) -> tuple[list[Sample], dict[str, list[Any]]]:
    """The next `count` samples that have all `columns`, each once per `task`; fewer, or none, where not so many are
    ready. TransferQueue's sampler chooses them.

    Raises: as `get`.
    """
    check_whole("take", "count", count)
    client = transfer_queue.get_client()
    names = [RECORD, *(c for name in columns for c in _columns_of(name))]
    ready = _ready(client, partition, names, task)
    if not ready:
        return get([], partition, columns)
    meta = client.get_meta(
        data_fields=names,
        batch_size=min(count, ready),
        partition_id=partition,
        mode="fetch",
        task_name=task,
    )
    ids = client.kv_retrieve_keys(global_indexes=meta.global_indexes, partition_id=partition)
    return get(ids, partition, columns)


def _ready(client: Any, partition: str, names: list[str], task: str) -> int:
    """Samples that have all of these columns, and that the task did not take yet."""
    at, produced = client.get_production_status(names, partition)
    if at is None or produced is None or not at.numel():
        return 0
    done_at, done = client.get_consumption_status(task, partition)
    done_of = dict(zip(done_at.tolist(), done.tolist(), strict=True)) if done is not None else {}
    whole = (produced.reshape(len(at), -1) == 1).all(1).tolist()
    return sum(w and not done_of.get(i) for i, w in zip(at.tolist(), whole, strict=True))


def _read(what: str, ids: list[str], partition: str, names: list[str]) -> list[dict[str, Any]]:
    """The columns of rows. Raises: ArgumentError for one that is not there."""
    meta = _meta(what, ids, partition)
    if missing := [name for name in names if name not in meta.field_names]:
        raise ArgumentError(
            f"{what}: {missing[0]} is not there for all {len(ids)} samples. "
            "Fix: wait until it was put, or take those that have it: take(…, columns=…)"
        )
    return rows_of(transfer_queue.get_client().get_data(meta.select_fields(names)))


def _meta(what: str, ids: list[str], partition: str) -> Any:
    """TransferQueue's meta of rows that are there. Raises: ArgumentError."""
    client = transfer_queue.get_client()
    meta = client.kv_retrieve_meta(keys=ids, partition_id=partition, create=False)
    if meta.size != len(ids):
        known = transfer_queue.kv_list(partition).get(partition, {})
        lost = next(name for name in ids if name not in known)
        raise ArgumentError(
            f"{what}: sample {lost!r:.60} is not in partition {partition!r:.60}. Fix: put the sample first"
        )
    return meta


def _ids(what: str, given: Sequence[str]) -> list[str]:
    if isinstance(given, str) or not all(isinstance(name, str) for name in given):
        raise ArgumentError(
            f"{what}: sample_ids is {kind_of(given)}. Fix: pass a list of sample_ids"
        )
    if len(set(given)) != len(given):
        raise ArgumentError(
            f"{what}: a sample_id occurs twice. Fix: pass each sample_id of a partition once"
        )
    return list(given)


def _tag(sample: Sample) -> dict[str, Any]:
    return {
        "group_id": sample.group_id,
        "tokens": len(sample),
        "loss_tokens": sample.num_loss_tokens,
        "patches": sample.num_patches,
    }


def _is_field(name: str) -> bool:
    return name in Sample.columns() or name.startswith(TEACHER)


def _columns_of(name: str) -> list[str]:
    """The queue's columns of a column's name."""
    if name == "teachers":
        raise ArgumentError(
            "TransferQueue: 'teachers' is no column by itself. Fix: name each teacher, teachers.NAME"
        )
    if name == "kept_ids" or name.startswith(TEACHER):
        return [f"{name}.{part}" for part in (PARTS[:2] if name == "kept_ids" else PARTS)]
    return [name]


def _encoded(name: str, value: Any, where: str) -> dict[str, Any]:
    """A value of a column as the queue holds it. Raises: TraceError."""
    names = _columns_of(name)
    if not _is_field(name):
        return {name: value}
    if name.startswith(TEACHER):
        spec: Any = RaggedSpec(scored=True)
    else:
        spec = Sample.columns()[name].spec
    if isinstance(spec, Records):  # of records or of dicts
        value = spec.read(spec.write(value, False), f"{where}.{name}")
    else:
        value = spec.read(value, f"{where}.{name}")
    arrays = field_columns(name, value)
    if arrays:
        return {c: turned(c, arrays[c]) for c in names}
    return {name: value if isinstance(spec, Str) else dump_json(plain_value(name, value, where))}
