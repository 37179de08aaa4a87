"""Build the wheel, compare it with the tree, and use it where nothing but numpy is installed: every public name and
command works, or says in one line which extra it needs.

Then once more with the extra [cli]; sdist and tree build one wheel; the light extras in one empty environment load what
they bring (`extras_check.py` resolves each alone, and many together); and the core runs in every Python of 3.11 or
newer that is here. `--dist FOLDER` checks the sdist and the wheel there. Prints a line for each check; the first that
fails ends it.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

CORE = """
import importlib.util
import sys

import numpy as np

import mmpack as mp

for name in ("torch", "transformers", "triton", "typer", "rich"):
    assert importlib.util.find_spec(name) is None, f"{name} is installed"

sample = mp.Sample(
    sample_id="s",
    group_id="g",
    family="qwen2_5_vl",
    input_ids=np.array([5, 6, 7, 8]),
    media=[],
    modality_spans=[],
    loss_spans=[mp.LossSpan(2, 4)],
    rollout_logprobs=np.array([-0.5, -0.25], dtype=np.float32),
)
assert mp.validate([sample]) == []
mp.write_trace("trace.jsonl", [sample])
(back,) = mp.read_trace("trace.jsonl")
assert back.input_ids.tolist() == [5, 6, 7, 8] and back.rollout_logprobs.tolist() == [-0.5, -0.25]
assert mp.__version__ == sys.argv[1], mp.__version__

need_torch = []
for room in (mp, mp.schema, mp.ops):
    for name in room.__all__:
        try:
            getattr(room, name)
        except mp.MissingExtraError as error:  # and no other error
            assert isinstance(error, ImportError) and "\\n" not in str(error), error
            assert str(error).endswith("Fix: pip install 'mmpack[torch]'"), error
            need_torch.append(name)
assert {"pack", "policy_loss", "pack_video", "probe"} <= set(need_torch), need_torch
assert not {"validate", "plan", "compare", "Ragged", "schema"} & set(need_torch), need_torch
print(len(need_torch))
"""

# What each command does where numpy, typer and rich are all there is: its exit code, and the extra that it names.
COMMANDS = [
    (("validate", "trace.jsonl"), 0, None),
    (("validate", "none.parquet"), 2, "parquet"),
    (("validate", "none.jsonl.zst"), 2, "zstd"),
    (("inspect", "trace.jsonl"), 0, None),
    (("convert", "trace.jsonl", "again.jsonl"), 0, None),
    (("parity", "trace.jsonl", "trace.jsonl"), 0, None),
    (("parity", "trace.jsonl", "trace.jsonl", "--html", "page.html"), 0, None),
    (("plan", "trace.jsonl", "--max-tokens", "99"), 0, None),
    (("frames", "none.mp4", "--policy", "vllm"), 2, "video"),
    (("probe", "none.probe", "none.probe"), 2, "torch"),
    (("smoke",), 2, "smoke"),
    (("doctor",), 0, None),
    (("schema",), 0, None),
    (("explain", "MM101"), 0, None),
    (("explain", "max_pixels"), 0, None),
    (("init", "loop", "started"), 0, None),
    (("init", "loop", "started"), 2, None),
]
# What they bring, by the module that is imported.
LIGHT = {
    "cli": "typer",
    "parquet": "pyarrow.parquet",
    "zstd": "zstandard",
    "data": "datasets",
    "video": "av",
    "audio": "soundfile",
    "grounding": "scipy.optimize",
    "planning": "scipy.optimize",
    "view": "PIL.Image",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--dist", type=Path, help="where an sdist and its wheel are; else they are built"
    )
    options = parser.parse_args()
    dist = options.dist
    with tempfile.TemporaryDirectory(prefix="mmpack-wheel-") as folder:
        work = Path(folder)
        wheel = built(work) if dist is None else the_wheel(dist)
        version = wheel.name.split("-")[1]
        check_contents(wheel)
        check_one_wheel(work, wheel)

        venv.create(work / "env", with_pip=True)
        python = work / "env" / "bin" / "python"
        command = work / "env" / "bin" / "mmpack"

        install(python, f"{wheel}")
        packages = json.loads(run(python, "-m", "pip", "list", "--format=json", cwd=work).stdout)
        names = {package["name"].lower() for package in packages} - {"pip", "setuptools"}
        assert names == {"mmpack", "numpy"}, names
        found = run(python, "-c", CORE, version, cwd=work).stdout.strip()
        print("core: imports, validates, writes and reads a trace with numpy alone")
        print(f"public names: {found} say that they need mmpack[torch], the others are there")

        for args in [("--help",), *(args for args, _, _ in COMMANDS)]:
            one_line(run(command, *args, cwd=work, exit_code=2), "cli")
        print("commands without [cli]: exit 2, and one line that names it")

        install(python, f"{wheel}[cli]")
        helped = run(command, "--help", cwd=work).stdout
        for name in ("none.parquet", "none.jsonl.zst", "none.mp4", "none.probe"):
            (work / name).write_bytes(b"x")
        for args, code, extra in COMMANDS:
            assert args[0] in helped
            result = run(command, *args, cwd=work, exit_code=code)
            if extra is not None:
                one_line(result, extra)
        json.loads(run(command, "schema", cwd=work).stdout)
        print(f"commands with [cli]: {len(COMMANDS)} run, or name the extra that they need")

        check_light_extras(work, wheel)
        check_pythons(work, wheel, version)


def one_line(result: subprocess.CompletedProcess[str], extra: str) -> None:
    assert result.stdout == "" and result.stderr.count("\n") == 1, result
    assert f"pip install 'mmpack[{extra}]'" in result.stderr, result.stderr


def built(work: Path) -> Path:
    """The wheel, built the long way round: the tree to an sdist, and that to the wheel."""
    run(sys.executable, "-m", "build", "--outdir", str(work / "dist"), str(ROOT), cwd=work)
    return the_wheel(work / "dist")


def the_wheel(dist: Path) -> Path:
    (wheel,) = dist.resolve().glob("*-py3-none-any.whl")
    (sdist,) = dist.glob("*.tar.gz")
    assert sdist.name == f"mmpack-{wheel.name.split('-')[1]}.tar.gz", sdist
    return wheel


def check_one_wheel(work: Path, wheel: Path) -> None:
    """The wheel that the tree builds by itself is the one that came through the sdist, byte for byte."""
    straight = work / "straight"
    run(sys.executable, "-m", "build", "--wheel", "--outdir", str(straight), str(ROOT), cwd=work)
    (other,) = straight.glob("*.whl")
    assert other.name == wheel.name and other.read_bytes() == wheel.read_bytes(), other.name
    print("sdist and tree build the same wheel, byte for byte")


def check_light_extras(work: Path, wheel: Path) -> None:
    """In an empty environment with all of them, what each brings loads."""
    venv.create(work / "light", with_pip=True)
    python = work / "light" / "bin" / "python"
    install(python, f"{wheel}[{','.join(LIGHT)}]")
    names = sorted({*LIGHT.values()})
    run(python, "-c", f"import mmpack, {', '.join(names)}", cwd=work)
    print(f"light extras in one environment: {', '.join(LIGHT)}")


def check_pythons(work: Path, wheel: Path, version: str) -> None:
    """The core in each minor version of Python that is here, numpy as pip finds it for that one."""
    tried = []
    for python in pythons():
        env = work / f"env-{python.name}-{wheel.name.split('-')[-1].split('.')[0]}"
        run(python, "-m", "venv", env, cwd=work)
        run(env / "bin" / "python", "-m", "pip", "install", "--quiet", wheel, cwd=work)
        run(env / "bin" / "python", "-c", CORE, version, cwd=env)
        tried.append(python.name)
    assert tried
    print(f"core of {wheel.name} in {', '.join(tried)}")


def pythons() -> list[Path]:
    """One of each minor version from 3.11 on: in PATH, or pyenv's."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = []
    for minor in range(11, 20):
        name = f"python3.{minor}"
        candidates = [shutil.which(name), *sorted(pyenv.glob(f"*/bin/{name}"))]
        for candidate in filter(None, candidates):
            usable = subprocess.run(
                [candidate, "-c", "import ensurepip, venv"], capture_output=True, check=False
            )
            if usable.returncode == 0:
                found.append(Path(candidate))
                break
    return found


def check_contents(wheel: Path) -> None:
    """The files of mmpack/, the manual page and no others are in the wheel, byte for byte."""
    tree = {
        path.relative_to(ROOT).as_posix(): path.read_bytes()
        for path in (ROOT / "mmpack").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    name_version = "-".join(wheel.name.split("-")[:2])
    manual = f"{name_version}.data/data/share/man/man1/mmpack.1"
    tree[manual] = (ROOT / "docs" / "mmpack.1").read_bytes()
    with zipfile.ZipFile(wheel) as archive:
        packed = {
            name: archive.read(name) for name in archive.namelist() if ".dist-info/" not in name
        }
        licences = [name for name in archive.namelist() if name.endswith("licenses/LICENSE")]
    assert packed.keys() == tree.keys(), f"differ: {sorted(packed.keys() ^ tree.keys())}"
    assert packed == tree, [name for name in tree if packed[name] != tree[name]]
    assert "mmpack/py.typed" in packed
    assert len(licences) == 1, "the licence is not in the wheel"
    print(f"{wheel.name}: {len(packed)} files, those of mmpack/ and the manual page")


def install(python: Path, requirement: str) -> None:
    constraints = str(ROOT / "constraints.txt")
    pip = (python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet")
    run(*pip, "-c", constraints, requirement, cwd=python.parent)


def run(
    *command: str | Path, cwd: Path, exit_code: int = 0, **variables: str
) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | variables
    result = subprocess.run(
        list(map(str, command)), cwd=cwd, env=env, capture_output=True, text=True, check=False
    )
    shown = " ".join(map(str, command))[:200]
    assert result.returncode == exit_code, (
        f"exit {result.returncode}, expected {exit_code}: {shown}\n{result.stdout}{result.stderr}"
    )
    return result


if __name__ == "__main__":
    main()
