"""Every rule and cause is explained; a rule's example breaks that rule and no other, the fixed one none."""

import re
from pathlib import Path

import pytest

import mmpack as mp
from mmpack.cli.explain import explained, lines, sections
from mmpack.cli.main import main
from mmpack.families import FAMILIES
from mmpack.parity.fixes import FIXES
from mmpack.schema.codes import OF_TEXT, RULES

pytest.importorskip("torch")  # some examples pack
ROOT = Path(__file__).resolve().parent.parent
RULE_TEXTS, CAUSE_TEXTS = sections("schema"), sections("parity")
CODE = re.compile(r"MM\d{3}")
CAUSE_HEADINGS = ["What it looks like", "Why", "How parity knows", "How to fix it"]
HEADINGS = ["Example", "What it looks like", "How to fix it"]


@pytest.fixture(autouse=True)
def own_folder_and_families(tmp_path, monkeypatch):
    """Examples write files, and one registers a family."""
    monkeypatch.chdir(tmp_path)
    known = dict(FAMILIES)
    yield
    FAMILIES.clear()
    FAMILIES.update(known)


@pytest.fixture
def page_script(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "site"))
    import explained as script

    return script


def validated(name: str) -> set[str]:
    """The codes of a file that an example wrote, by the library rather than the command."""
    try:
        return {problem.code for problem in mp.validate(mp.read_trace(name))}
    except mp.errors.TraceError as error:
        return {error.code}


def test_every_code_is_explained_and_nothing_else():
    assert list(RULE_TEXTS) == list(RULES) and list(CAUSE_TEXTS) == list(FIXES)
    assert list(lines()) == [*RULES, *FIXES]
    table = (ROOT / "docs" / "rules.md").read_text(encoding="utf-8")
    assert re.findall(r'<a id="(MM\d{3})"></a>\1', table) == list(RULES)


def test_the_command_explains(capsys, monkeypatch):
    for code, (says, fix) in lines().items():
        assert main(["explain", code]) == 0
        printed = capsys.readouterr().out
        assert printed == explained(code.upper())
        assert printed.startswith(f"{code}: {says}\nFix: {fix}\n\n")
        assert len(printed.split("\n")) > 10
    for given, near in (("aplha", "alpha"), ("MM1011", "MM101"), ("max_pixel", "max_pixels")):
        assert main(["explain", given]) == 2
        out, error = capsys.readouterr()
        assert out == "" and error.count("\n") == 1 and near in error.partition("Fix: ")[2]
    monkeypatch.setenv("COLUMNS", "400")
    assert main(["explain", "zzzzzzzz"]) == 2
    assert "the list that `mmpack explain` prints" in capsys.readouterr().err
    assert main(["explain"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]] == list(lines())


@pytest.mark.parametrize("code", RULES)
def test_a_rule_has_all_parts(code):
    text = RULE_TEXTS[code][1]
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == HEADINGS
    first = text.partition("\n")[0]
    assert re.match(r"(Fields?|Arguments?|Where): \S", first), first
    parts = re.split(r"^## .*\n\n", text, flags=re.MULTILINE)
    assert parts[1].startswith("```python\n")
    assert not parts[2].startswith("```") and "```" not in parts[2]
    assert not parts[3].startswith("```") and "```python\n" in parts[3]


def test_a_cause_has_all_parts():
    for says, text in CAUSE_TEXTS.values():
        assert says and re.findall(r"^## (.*)$", text, re.MULTILINE) == CAUSE_HEADINGS
        assert "rollout's side: " in text and "trainer's side: " in text


def test_the_page_of_causes_is_fresh(page_script):
    page = (ROOT / "docs" / "causes.md").read_text(encoding="utf-8")
    assert page == page_script.causes_markdown(), "stale. Fix: python docs/site/explained.py"


@pytest.mark.parametrize("code", RULES)
def test_the_example_breaks_the_rule_and_the_mended_one_none(code, page_script, capsys):
    text = RULE_TEXTS[code][1]
    made = page_script.shown(text, code)
    assert made.text == text, f"stale. Fix: python docs/site/explained.py {code}"
    assert set(CODE.findall("".join(made.broken))) == {code}
    if Path("fixed.jsonl").exists():
        assert main(["validate", "fixed.jsonl"]) == 0
        made.fixed.append(capsys.readouterr().out)
        assert made.fixed[-1].startswith("OK: ")
    assert made.fixed and not CODE.search("".join(made.fixed))
    assert all(text.strip() for text in made.fixed)
    if code < "MM4" and code not in (*OF_TEXT, "MM012"):
        assert validated("broken.jsonl") == {code} and validated("fixed.jsonl") == set()


def test_fields_are_those_of_the_schema():
    """What a text names first exists in a sample, a medium, a span or an argument."""
    kinds = (
        mp.Sample,
        mp.Medium,
        mp.schema.ModalitySpan,
        mp.LossSpan,
        mp.schema.RegionSpan,
        mp.schema.ActionSpan,
    )
    kinds += (mp.Score, mp.schema.CodecIds, mp.schema.Ragged)
    known = {name for kind in kinds for name in kind.__dataclass_fields__}
    for code in RULES:
        if code < "MM4":
            line = RULE_TEXTS[code][1].split("\n")[0].partition(". Found by")[0]
            names = re.findall(r"`([a-z_]+)", line)
            assert set(names) <= known, (code, set(names) - known)
