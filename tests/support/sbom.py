"""The bill of materials of a release, CycloneDX 1.6 as JSON: `python tests/support/sbom.py DIST`, beside the wheel.

It is of an empty environment with the wheel in it: mmpack, numpy, their licences. Extras are not in it: whoever
installs some makes one of the environment at hand with the same program, cyclonedx-py.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dist", type=Path, help="the folder of the wheel")
    dist = parser.parse_args().dist.resolve()
    (wheel,) = dist.glob("*-py3-none-any.whl")
    version = wheel.name.split("-")[1]
    target = dist / f"mmpack-{version}.cdx.json"
    with tempfile.TemporaryDirectory(prefix="mmpack-sbom-") as folder:
        venv.create(folder, with_pip=True)
        python = Path(folder) / "bin" / "python"
        run(python, "-m", "pip", "install", "--quiet", wheel)
        run(python, "-m", "pip", "uninstall", "--quiet", "--yes", "pip", "setuptools")
        made = [
            "-m",
            "cyclonedx_py",
            "environment",
            "--spec-version",
            "1.6",
            "--output-format",
            "JSON",
        ]
        run(
            sys.executable,
            *made,
            "--output-reproducible",
            "--validate",
            "--output-file",
            target,
            python,
        )
    text = target.read_text(encoding="utf-8").replace(f"{dist.as_uri()}/", "")  # where it was built
    target.write_text(text, encoding="utf-8")
    parts = {part["name"]: part for part in json.loads(text)["components"]}
    assert parts.keys() == {"mmpack", "numpy"}, sorted(parts)
    assert parts["mmpack"]["version"] == version and all(
        part.get("licenses") for part in parts.values()
    )
    shown = (f"{name} {part['version']}" for name, part in parts.items())
    print(f"{target.name}: {', '.join(shown)}")
    return 0


def run(*command: str | Path) -> None:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run(list(map(str, command)), env=env, check=True)


if __name__ == "__main__":
    sys.exit(main())
