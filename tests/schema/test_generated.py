"""The JSON schema is fresh, is a schema, takes what `write_trace` writes and refuses broken records."""

import copy
import json
from pathlib import Path

import jsonschema
import pytest
from hypothesis import given, settings
from support.samples import full_sample, samples

from mmpack.schema.codes import RULES
from mmpack.schema.json_schema import action_schema, rules_markdown, sample_schema, schema_text
from mmpack.schema.trace import read_trace, write_trace

ROOT = Path(__file__).resolve().parents[2]
VALIDATOR = jsonschema.Draft202012Validator(sample_schema())


def test_generated_files_are_fresh():
    made = {
        "schemas/sample.schema.json": schema_text(sample_schema()),
        "schemas/action.schema.json": schema_text(action_schema()),
        "docs/rules.md": rules_markdown(),
    }
    for path, text in made.items():
        assert (ROOT / path).read_bytes() == text.encode(), path
    jsonschema.Draft202012Validator.check_schema(sample_schema())
    assert list(sample_schema()["x-rules"]) == list(RULES)


@settings(max_examples=20)
@given(sample=samples())
def test_written_records_fit(tmp_path_factory, sample):
    path = tmp_path_factory.mktemp("t") / "t.jsonl"
    write_trace(path, [sample])
    VALIDATOR.validate(json.loads(path.read_text()))


@pytest.fixture
def record(tmp_path):
    write_trace(tmp_path / "t.jsonl", [full_sample()])
    return json.loads((tmp_path / "t.jsonl").read_text())


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (["schema_version"], "3"),
        (["sample_id"], 3),
        (["family"], "llama"),
        (["input_ids", 0], -1),
        (["attention_mask", 0], 2),
        (["position_ids", 0], 5),
        (["processor_fingerprint"], "md5:00"),
        (["media", 0, "modality"], "smell"),
        (["media", 0, "grid_thw", 0], 2**40),
        (["loss_spans", 0, "start"], 1.5),
        (["rewards", 0, "scope"], {"turn": 0, "region": 0}),
        (["finish_reason"], "tired"),
    ],
)
def test_broken_records_fit_neither_schema_nor_reader(tmp_path, record, place, value):
    holder = record = copy.deepcopy(record)
    for key in place[:-1]:
        holder = holder[key]
    holder[place[-1]] = value
    assert not VALIDATOR.is_valid(record)
    (tmp_path / "bad.jsonl").write_text(json.dumps(record))
    with pytest.raises(ValueError, match="MM0"):
        list(read_trace(tmp_path / "bad.jsonl"))


def test_required_fields_are_required_by_both(tmp_path, record):
    required = sample_schema()["required"]
    assert len(required) == 8
    record["engine"] = record["media"][0]["engine"] = {"a": 1}  # unknown fields fit
    for name in record:
        less = {k: v for k, v in record.items() if k != name}
        (tmp_path / "less.jsonl").write_text(json.dumps(less))
        assert VALIDATOR.is_valid(less) == (name not in required)
        if name in required:
            with pytest.raises(ValueError, match="MM004"):
                list(read_trace(tmp_path / "less.jsonl"))
        else:
            assert len(list(read_trace(tmp_path / "less.jsonl"))) == 1
