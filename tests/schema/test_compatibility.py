"""docs/stability.md holds: traces of earlier versions are read, and what a released schema takes is taken."""

import json
from pathlib import Path

import jsonschema
import pytest

import mmpack as mp
from mmpack.schema.json_schema import action_schema, sample_schema
from mmpack.schema.sample import SCHEMA_VERSION, VERSIONS

ROOT = Path(__file__).resolve().parents[2]
TRACES = ROOT / "fixtures" / "traces"
RELEASED = ROOT / "schemas" / "released"
TEXTS = ("description", "title", "$schema", "x-rules")


def written(version):
    """Records as a released mmpack wrote them."""
    text = (TRACES / f"version_{version}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def test_each_version_that_is_read_has_its_traces():
    names = {path.name.partition(".")[0] for path in TRACES.glob("*.jsonl")}
    assert names == {f"version_{version}" for version in VERSIONS}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("kind", [".jsonl", ".jsonl.zst", ".parquet"])
def test_released_traces_are_read(version, kind):
    samples = list(mp.read_trace(TRACES / f"version_{version}{kind}"))
    assert mp.validate(samples) == []
    records = written(version)
    assert [sample.sample_id for sample in samples] == ["a", "b"]
    for sample, record in zip(samples, records, strict=True):
        assert sample.schema_version == version
        again = json.loads(json.dumps(sample.to_dict()))
        assert {
            name: again[name] for name in record
        } == record  # nothing lost, nothing read differently


@pytest.mark.parametrize("version", VERSIONS)
def test_released_records_fit_the_schema_of_today(version):
    validator = jsonschema.Draft202012Validator(sample_schema())
    for record in written(version):
        validator.validate(record)


def narrower(old, new, where=""):
    """Where `new` takes less than `old` took: the keys of both JSON schemas, walked together."""
    out = []
    for name in old.get("properties", {}).keys() - new.get("properties", {}).keys():
        out.append(f"{where}.{name} is gone")
    out += [
        f"{where}.{name} is required"
        for name in {*new.get("required", ())} - {*old.get("required", ())}
    ]
    if "enum" in old and not {*old["enum"]} <= {*new.get("enum", old["enum"])}:
        out.append(f"{where} takes fewer values")
    for key in old.keys() - {"properties", "required", "enum", "$defs", *TEXTS}:
        if isinstance(old[key], dict):
            out += narrower(old[key], new.get(key, {}), f"{where}.{key}")
        elif old[key] != new.get(key) and key not in ("anyOf", "oneOf"):
            out.append(f"{where}.{key} was {old[key]}, is {new.get(key)}")
    for group in ("properties", "$defs"):
        for name in old.get(group, {}).keys() & new.get(group, {}).keys():
            out += narrower(old[group][name], new[group][name], f"{where}.{name}")
    return out


def released():
    text = (RELEASED / f"sample-{SCHEMA_VERSION}.json").read_text(encoding="utf-8")
    return json.loads(text)


def test_a_version_only_grows():
    assert narrower(released(), sample_schema()) == []
    actions = json.loads((RELEASED / "action.json").read_text(encoding="utf-8"))
    assert narrower(actions, action_schema()) == []


def test_what_would_break_readers_is_found():
    for change, said in [
        (lambda s: s["properties"].pop("turn"), ".turn is gone"),
        (lambda s: s["required"].append("turn"), ".turn is required"),
        (lambda s: s["properties"]["family"]["enum"].pop(), ".family takes fewer values"),
        (lambda s: s["properties"]["sample_id"].update(type="integer"), ".sample_id.type was"),
    ]:
        schema = released()
        change(schema)
        (found,) = narrower(released(), schema)
        assert found.startswith(said)
