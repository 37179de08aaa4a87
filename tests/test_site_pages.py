"""Every page is in the tree of the site, which docs/index.md's lists make; `make docs` builds it."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
# reached by patterns, and what the site makes for itself
BELOW = {"api"}


def test_the_index_lists_every_page_once():
    text = (DOCS / "index.md").read_text(encoding="utf-8")
    listed = re.findall(r"^- \[[^]]+\]\(([^)#]+)\)", text, re.MULTILINE)
    assert len(listed) == len(set(listed))
    assert all((DOCS / path).is_file() for path in listed)
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.glob("**/*.md")}
    pages = {page for page in pages if page.partition("/")[0] not in BELOW}
    pages |= {f"../{path.name}" for path in ROOT.glob("*.md")}
    assert pages - {"index.md"} - set(listed) == set()
