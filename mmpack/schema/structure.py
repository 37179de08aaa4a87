"""What the rules may rely on: a sample in memory whose every field has the type that `read_trace` gives it."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np

from mmpack.errors import TraceError
from mmpack.families import FAMILIES, Family
from mmpack.schema.error_text import fail, named, shown
from mmpack.schema.fields import Array, Column
from mmpack.schema.sample import Sample


def structured(sample: Sample) -> tuple[Sample, Family, list[TraceError]]:
    """The sample, its family and its faults: what is no sample of the schema at all, by field.

    Without faults, the sample is as `read_trace` makes it (a copy where a field was, say, a numpy integer). Never
    raises, and allocates no more than the sample holds.
    """
    faults: list[TraceError] = []
    values: dict[str, Any] = sample.__dict__
    changed: dict[str, Any] = {}
    for name, declared in sample.columns().items():
        value = values.get(name)
        if value is None:
            if declared.required:
                faults.append(fail(name, "is missing", "MM004"))
        elif isinstance(declared.spec, Array):
            changed |= _array(name, declared, value, faults)
        elif not declared.spec.holds(value):
            before = len(faults)
            changed[name] = declared.spec.taken(value, name, faults)
            if name == "schema_version" and len(faults) > before:
                faults[before:] = [fail(name, f"{shown(value)} is unknown", "MM005")]
    known = values.get("family")
    family = FAMILIES.get(known) if isinstance(known, str) else None
    if family is None:
        if isinstance(known, str):
            why = f"{named(known)} is unknown. Known: {', '.join(FAMILIES)}"
            faults.append(fail("family", why, "MM006"))
        family = next(iter(FAMILIES.values()))
    if not faults and changed:
        sample = copy.copy(sample)
        sample.__dict__.update(changed)
    if not faults:
        _shapes(sample, family, faults)
    return sample, family, faults


def _array(
    name: str, declared: Column, value: Any, faults: list[TraceError]
) -> dict[str, np.ndarray]:
    """Other than in a file, an array must have its dtype: what reads it would copy or misread it."""
    spec = declared.spec
    assert isinstance(spec, Array)
    if not isinstance(value, np.ndarray) or value.dtype != spec.dtype:
        found = getattr(value, "dtype", None)
        found = found if isinstance(found, np.dtype) else type(value).__name__
        faults.append(fail(name, f"is {found}, expected a numpy array of {spec.dtype}"))
        return {}
    array = np.asarray(value)
    if array.ndim != (1 if spec.rows is None else 2):
        expected = "[n]" if spec.rows is None else "[rows, n]"
        faults.append(fail(name, f"has shape {list(array.shape)}, expected {expected}", "MM008"))
    elif array.size and array.dtype.kind == "f" and not np.isfinite(array).all():
        at = int(np.argmin(np.isfinite(array)))
        faults.append(fail(f"{name}[{at}]", f"is {array[at]}", "MM009"))
    elif array.size and array.dtype.kind == "i":
        _range(name, spec, array, faults)
    return {} if array is value else {name: array}


def _range(name: str, spec: Array, array: np.ndarray, faults: list[TraceError]) -> None:
    flat = array.reshape(-1)
    if spec.low is not None and flat.min() < spec.low:
        at = int(flat.argmin())
        faults.append(fail(f"{name}[{at}]", f"is {flat[at]}, expected {spec.low} or more"))
    elif spec.high is not None and flat.max() > spec.high:
        at = int(flat.argmax())
        faults.append(fail(f"{name}[{at}]", f"is {flat[at]}, expected {spec.high} or less"))


def _shapes(sample: Sample, family: Family, faults: list[TraceError]) -> None:
    length = len(sample.input_ids)
    shapes = {
        "position_ids": (family.position_rows, length),
        "attention_mask": (length,),
    }
    for name, shape in shapes.items():
        array = getattr(sample, name)
        if array is not None and array.shape != shape:
            why = f"has shape {list(array.shape)}, expected {list(shape)}"
            faults.append(fail(name, why, "MM008"))
