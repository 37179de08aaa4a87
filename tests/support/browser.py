"""A page in a real browser, headless and offline: what a script around it measures."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)
MISSING = f"no browser: none of {', '.join(NAMES)} is found"
# a page around the pages; `w`, `d` are the window and the document of an inner one
FRAME = '<iframe src="{name}.html" style="width:{width}px;height:900px"></iframe>'
OUTER = """<!doctype html><body>{frames}
<pre id=out></pre><script>
window.onload = async () => {{ const found = [];
  for (const f of document.querySelectorAll("iframe")) {{
    const w = f.contentWindow, d = f.contentDocument, root = d.documentElement;
    const press = key => d.activeElement.dispatchEvent(
      new w.KeyboardEvent("keydown", {{key, bubbles: true, cancelable: true}}));
    const all = s => [...d.querySelectorAll(s)];
    try {{ found.push(await (async () => {{ {script} }})()) }} catch (error) {{ found.push({{error: String(error)}}) }}
  }}
  out.textContent = JSON.stringify(found); }}
</script></body>"""


def measured(folder: Path, html: str, script: str, width: int = 1100, dark: bool = False) -> Any:
    """What `script` (JavaScript, the body of a function) returns about the page, through JSON."""
    return measured_each(folder, {"page": html}, script, width, dark)["page"]


def measured_each(
    folder: Path, pages: dict[str, str], script: str, width: int = 1100, dark: bool = False
) -> dict[str, Any]:
    """The same of several pages, by name, in one browser."""
    assert BROWSER is not None
    for name, html in pages.items():
        (folder / f"{name}.html").write_text(html, encoding="utf-8")
    frames = "".join(FRAME.format(name=name, width=width) for name in pages)
    outer = OUTER.format(frames=frames, script=script)
    (folder / "outer.html").write_text(outer, encoding="utf-8")
    done = subprocess.run(
        [
            BROWSER,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--allow-file-access-from-files",
            "--host-resolver-rules=MAP * ~NOTFOUND",
            f"--user-data-dir={folder / 'profile'}",
            f"--blink-settings=preferredColorScheme={0 if dark else 1}",
            "--virtual-time-budget=5000",
            f"--window-size={width + 50},1000",
            "--dump-dom",
            (folder / "outer.html").as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    found = re.search(r'<pre id="out">(.+?)</pre>', done.stdout, re.DOTALL)
    assert found, done.stderr[-2000:]
    text = found[1]
    for name, letter in (("lt", "<"), ("gt", ">"), ("amp", "&")):
        text = text.replace(f"&{name};", letter)
    values = json.loads(text)
    for value in values:
        assert not (isinstance(value, dict) and "error" in value), value
    return dict(zip(pages, values, strict=True))
