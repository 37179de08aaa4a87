"""Does each extra resolve by itself, and TOGETHER under the pins? `python tests/support/extras_check.py`.

In the environment of `make release`, by uv, which reads what packages say of themselves and installs nothing:
frameworks exclude one another, and some need a GPU or a compiler. Prints how many packages each brings; exits 1 and
names those without a resolution.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
UV = Path(sys.executable).parent / "uv"
TOGETHER = "cli,parquet,zstd,data,video,decord,torchcodec,triton,fa4,fla,view,smoke,trl"


def main() -> int:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (oldest,) = re.findall(r">=([\d.]+)$", project["requires-python"])
    extras = [TOGETHER, *project["optional-dependencies"]]

    def resolved(extra: str) -> subprocess.CompletedProcess[str]:
        command = [UV, "pip", "compile", "--quiet", "--no-header", "--no-annotate"]
        command += [ROOT / "pyproject.toml", "--python-version", oldest]
        command += [word for name in extra.split(",") for word in ("--extra", name)]
        command += ["--constraint", ROOT / "constraints.txt"] if extra == TOGETHER else []
        return subprocess.run(
            [*map(str, command)], cwd=ROOT, capture_output=True, text=True, check=False
        )

    failed = []
    with ThreadPoolExecutor(4) as pool:  # most of the time is the index's
        found = list(zip(extras, pool.map(resolved, extras), strict=True))
    for extra, done in found:
        if done.returncode:
            failed.append(extra)
            print(f"{extra}: {' '.join(done.stderr.split())[:500]}", file=sys.stderr)
        else:
            print(f"{extra}: {done.stdout.count('==')} packages", flush=True)
    if failed:
        print(f"no resolution on Python {oldest}: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
