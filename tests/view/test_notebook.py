"""A report shows itself in a notebook as soon as `mp.compare` made it; without what writes pages it names the extra."""

import subprocess
import sys

import pytest

MAKE = """
import sys
{before}
import mmpack as mp

sample = mp.Sample(
    sample_id="<b>", group_id="g", family="qwen2_5_vl", input_ids=[1, 2],
    media=[], modality_spans=[], loss_spans=[],
)
report = mp.compare([sample], [])
print(report._repr_html_())
try:
    print(report.to_html()[:15])
except mp.MissingExtraError as error:
    print(error)
"""


def shown(before=""):
    """What a new process prints that imports `mmpack` and nothing of `mmpack.view`."""
    command = [sys.executable, "-c", MAKE.format(before=before)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_what_compare_returns_has_its_look():
    out = shown()
    assert out.startswith('<div class="mmpack">') and "&lt;b&gt;" in out and "<b>&" not in out
    assert out.endswith("<!doctype html>\n")


@pytest.mark.parametrize("package", ["markupsafe", "jinja2"])
def test_without_a_package_the_extra_is_named(package):
    out = shown(f"sys.modules['{package}'] = None")
    notebook, error = out.split("</pre>\n")
    fix = "Fix: pip install 'mmpack[view]'"
    assert notebook.startswith("<pre>parity NOT ok: 0 samples compared, 1 finding")
    assert "mmpack[view]" in notebook and package in notebook
    assert error.strip().endswith(fix) and f"'{package}'" in error
