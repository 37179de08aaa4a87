"""What adapters say they were run with is what the environments pin, and there is a line for each adapter."""

import ast
import importlib.metadata

import pytest
from support import tried_with


def test_the_table_and_the_docstrings_are_those_of_the_pins():
    for path, text in tried_with.wanted().items():
        assert path.read_text(encoding="utf-8") == text, path


def test_the_table_has_each_adapter_that_names_a_framework():
    """Those of a folder, and the modules that docs/adapters.md lists."""
    folders = (tried_with.ROOT / "mmpack" / "adapters").iterdir()
    public = {p.name for p in folders if (p / "__init__.py").is_file()}
    assert public <= tried_with.TRIED.keys()
    page = tried_with.PAGE.read_text(encoding="utf-8")
    table = page.partition(tried_with.BEGIN)[2].partition(tried_with.END)[0]
    for adapter in tried_with.TRIED:
        assert f"`{adapter}`" in table or f"`mmpack.adapters.{adapter}`" in table
        documented = ast.get_docstring(ast.parse(tried_with.module(adapter).read_text("utf-8")))
        assert documented.count("Run with ") == 1


@pytest.mark.parametrize("adapter", ["torch", "datasets", "trl"])
def test_this_environment_has_what_is_said(adapter):
    for part in tried_with.tried_with(adapter).split(", "):
        package, _, version = part.partition(" ")
        if package != "deepspeed":
            found = importlib.metadata.version(package).partition("+")[0]
            assert found == version, package


def test_a_stale_page_is_written_anew(tmp_path, monkeypatch):
    line = "| `mmpack.adapters.trl` | 1.0 | rows | below |\n"
    head = "| adapter | run with | holds | page |\n"
    made = tried_with.page(f"a\n{tried_with.BEGIN}{head}{line}{tried_with.END}b\n")
    said = tried_with.tried_with("trl")
    assert made.splitlines()[2:4] == [
        head.strip(),
        f"| `mmpack.adapters.trl` | {said} | rows | below |",
    ]
    assert "transformers 5." in said and made.endswith(f"{tried_with.END}b\n")
    with pytest.raises(SystemExit, match="lost its marks"):
        tried_with.page("a\n")
