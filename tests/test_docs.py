"""What the pages name must exist: links, public names, commands, make targets, causes."""

import ast
import importlib
import re
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import pytest

import mmpack as mp
from mmpack.cli.main import COMMANDS
from mmpack.parity.fixes import FIXES

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/*.md"),
        *ROOT.glob("benchmarks/results/*.md"),
        *ROOT.glob("mmpack/*/explained.md"),
    ]
)
FIRST_WORDS = {name.partition(" ")[0] for name in COMMANDS}
LINK = re.compile(r"""\]\(([^)\s]+)\)|src="([^"]+)\"""")
NAMED = re.compile(r"(?<![\w/])(?:docs|schemas)/[\w/.-]+\.(?:md|json)\b")


def found(pattern: str, page: Path) -> set[str]:
    return set(re.findall(pattern, page.read_text(encoding="utf-8")))


def in_code(pattern: str, page: Path) -> set[str]:
    """Like `found`, only in shell blocks and inline code."""
    code = re.findall(r"```sh\n.*?```|`[^`\n]+`", page.read_text(encoding="utf-8"), re.DOTALL)
    return {name for part in code for name in re.findall(pattern, part)}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_pages_name_what_exists(page):
    targets = {a or b for a, b in LINK.findall(page.read_text(encoding="utf-8"))}
    local = {t.partition("#")[0] for t in targets if "://" not in t} - {""}
    assert [t for t in sorted(local) if not (page.parent / t).exists()] == []
    if page.name == "explained.md":  # printed, with paths instead of links
        assert [path for path in found(NAMED.pattern, page) if not (ROOT / path).exists()] == []
    assert found(r"\bmp\.([A-Za-z_]\w*)", page) - set(mp.__all__) == set()
    assert in_code(r"\bmmpack ([a-z]\w*)", page) - FIRST_WORDS == set()
    make_targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert in_code(r"\bmake ([a-z-]+)", page) - make_targets == set()


def exists(name: str) -> bool:
    """Whether a dotted name is a module, or a name in one."""
    module, _, last = name.rpartition(".")
    try:
        with suppress(ModuleNotFoundError):  # where its parent is no package
            if find_spec(name) is not None:
                return True
        return hasattr(importlib.import_module(module), last)
    except mp.MissingExtraError:  # its package is in another environment
        defined = ast.parse(Path(find_spec(module).origin).read_text(encoding="utf-8")).body
        imported = [node.names for node in defined if isinstance(node, ast.ImportFrom)]
        return last in {getattr(node, "name", None) for node in sum(imported, defined)}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_pages_import_what_exists(page):
    if page.name == "CHANGELOG.md":  # it names what was
        return
    names = found(r"\bmmpack(?:\.[A-Za-z_]\w*)+", page)
    for block in found(r"(?s)```python\n(.*?)```", page):
        imports = re.findall(r"^from mmpack[^\n]* import [^\n(]+$", block, re.MULTILINE)
        for node in ast.parse("\n".join(imports)).body:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    assert [name for name in sorted(names) if not exists(name)] == []


def test_the_page_of_causes_lists_each_with_its_fix():
    rows = re.findall(
        r'^\| <a id="(\w+)"></a>`\1` \| .+ \| (.+) \|$',
        (ROOT / "docs/causes.md").read_text(encoding="utf-8"),
        flags=re.MULTILINE,
    )
    assert rows == list(FIXES.items())
