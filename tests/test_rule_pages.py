"""Every rule has a page: its example breaks that rule and no other, the fixed one none, and what is printed is so."""

import re
from pathlib import Path

import pytest

import mmpack as mp
from mmpack.families import FAMILIES
from mmpack.schema.codes import OF_TEXT, RULES

pytest.importorskip("torch")  # some pages pack
ROOT = Path(__file__).resolve().parent.parent
PAGES = ROOT / "docs" / "rules"
CODE = re.compile(r"MM\d{3}")
HEADINGS = ["Example", "What it looks like", "How to fix it"]


@pytest.fixture(autouse=True)
def own_folder_and_families(tmp_path, monkeypatch):
    """Pages write files, and one registers a family."""
    monkeypatch.chdir(tmp_path)
    known = dict(FAMILIES)
    yield
    FAMILIES.clear()
    FAMILIES.update(known)


@pytest.fixture
def shown(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "site"))
    import rule_pages

    return rule_pages.shown


def page_of(code: str) -> str:
    return (PAGES / f"{code}.md").read_text(encoding="utf-8")


def validated(name: str) -> set[str]:
    """The codes of a file that a page wrote, by the library rather than the command."""
    try:
        return {problem.code for problem in mp.validate(mp.read_trace(name))}
    except mp.TraceError as error:
        return {error.code}


def test_every_rule_has_a_page_and_every_page_a_rule():
    assert sorted(path.stem for path in PAGES.iterdir()) == sorted(RULES)
    table = (ROOT / "docs" / "rules.md").read_text(encoding="utf-8")
    assert re.findall(r"\[(MM\d{3})\]\(rules/\1\.md\)", table) == list(RULES)


@pytest.mark.parametrize("code", RULES)
def test_a_page_has_all_parts(code):
    page = page_of(code)
    assert page.startswith(f"# {code}: {RULES[code].says}\n")
    assert re.findall(r"^## (.*)$", page, re.MULTILINE) == HEADINGS
    first = page.split("\n")[2]
    assert re.match(r"(Fields?|Arguments?|Where): \S", first), first
    parts = re.split(r"^## .*\n\n", page, flags=re.MULTILINE)
    assert parts[1].startswith("```python\n")
    assert not parts[2].startswith("```") and "```" not in parts[2]
    assert not parts[3].startswith("```") and "```python\n" in parts[3]


@pytest.mark.parametrize("code", RULES)
def test_the_example_breaks_the_rule_and_the_mended_one_none(code, shown, monkeypatch):
    page = page_of(code)
    made = shown(page, code)
    assert made.text == page, f"stale. Fix: python docs/site/rule_pages.py {code}"
    assert set(CODE.findall("".join(made.broken))) == {code}
    assert made.fixed and not CODE.search("".join(made.fixed))
    assert all(text.strip() for text in made.fixed)
    if code < "MM4" and code not in (*OF_TEXT, "MM012"):
        assert validated("broken.jsonl") == {code} and validated("fixed.jsonl") == set()
        assert "OK: " in made.fixed[-1]


def test_fields_are_those_of_the_schema():
    """What a page names first exists in a sample, a medium, a span or an argument."""
    known = {*mp.Sample.__dataclass_fields__, *mp.Medium.__dataclass_fields__}
    for kind in (
        mp.ModalitySpan,
        mp.LossSpan,
        mp.RegionSpan,
        mp.ActionSpan,
        mp.Score,
        mp.CodecIds,
        mp.Ragged,
    ):
        known |= {*kind.__dataclass_fields__}
    for code in RULES:
        if code < "MM4":
            line = page_of(code).split("\n")[2].partition(". Found by")[0]
            names = re.findall(r"`([a-z_]+)", line)
            assert set(names) <= known, (code, set(names) - known)
