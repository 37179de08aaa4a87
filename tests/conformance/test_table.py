"""README's table is what the results say; a result that failed is never a yes."""

from pathlib import Path

from support.process import run_python

PASSED = {"result": "passed", "versions": {"transformers": "5.9.0", "torch": "2.13.0+cpu"}}
NEWER = {"result": "passed", "versions": {"transformers": "5.23.0", "trl": "1.16.0", "verl": None}}


def test_cells_notes_and_versions():
    from table import COLUMNS, text

    every = {name for names in COLUMNS.values() for name in names}
    whole = dict.fromkeys(every, PASSED) | {"trl": NEWER}
    broken = whole | {"positions": {"result": "failed", "why": "positions of sample s0: entry 3"}}
    broken |= {"video": {"result": "lacks", "why": "a video is a series of images"}}
    del broken["verl"]
    without = whole | {"video": broken["video"]}
    results = {"qwen2_vl": whole, "internvl": broken, "gemma3": without}
    lines = text(results).splitlines()
    assert lines[2] == f"| `qwen2_vl` |{' yes |' * len(COLUMNS)}"
    cells = dict(zip(COLUMNS, [c.strip() for c in lines[3].split("|")[2:-1]], strict=True))
    assert (cells["layout"], cells["video"], cells["verl"]) == ("**no**", "–", "")
    assert cells["packed"] == "yes"
    assert "Run on transformers 5.23.0 and 5.9.0, torch 2.13.0+cpu, trl 1.16.0." in lines
    assert "- layout, `internvl`: positions of sample s0: entry 3." in lines
    assert "- video, `internvl`, `gemma3`: a video is a series of images." in lines


def test_the_plugin_loads_no_torch():
    """Every session of this project loads it, before the settings that torch reads."""
    code = "import conformance.plugin, sys; print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    done = run_python(code, cwd=Path(__file__).parents[1])
    assert done.stdout.strip() == "[]"
