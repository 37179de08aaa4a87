"""Sphinx over the Markdown pages as they stand: `make docs`.

The source directory is the repository, so that links between pages, and from pages to code, are those of GitHub. What
a page of Markdown can't say is added here: the tree of pages, from the lists of docs/index.md, and the reference.
"""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import pages  # noqa: E402
import reference  # noqa: E402

project = "mmpack"
release = version = reference.version()
author = copyright = "the authors of mmpack"
language = "en"
smartquotes = False  # quotes in a fix are to be typed

root_doc = pages.INDEX
include_patterns = [
    "docs/**.md",
    "benchmarks/results/*.md",
    "benchmarks/scale.md",
    "tests/*/README.md",
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
]
exclude_patterns = [".*", "build", "mmpack", "fixtures", "docs/site"]
extensions = ["myst_parser", "sphinx_copybutton"]

myst_enable_extensions = ["deflist", "html_image"]
myst_heading_anchors = 4
suppress_warnings = [
    "misc.highlighting_failure",  # code with … where the reader's own goes
]
maximum_signature_line_length = 80
add_module_names = False
python_use_unqualified_type_names = True
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_title = f"mmpack {release}"
html_static_path = ["static"]
html_extra_path = ["extra"]  # index.html, which leads to docs/index.html
html_css_files = ["site.css"]
html_copy_source = False
html_show_copyright = html_show_sphinx = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#1565c0", "color-brand-content": "#1565c0"},
    "dark_css_variables": {"color-brand-primary": "#82b1ff", "color-brand-content": "#82b1ff"},
}
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True


def setup(app):
    names = reference.write(HERE.parent / "api")
    app.connect("source-read", pages.with_tree)
    app.connect("source-read", pages.with_answers)
    app.connect("doctree-read", lambda app, doctree: pages.link_names(doctree, names))
    app.connect("doctree-read", pages.name_rows)
    app.connect("doctree-resolved", pages.link_rules)
