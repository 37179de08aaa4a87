"""Build the wheel, compare it with the tree, and use it where nothing but numpy is installed: every public name and
command works, or says in one line which extra it needs.

Then once more with the extra [cli]; sdist and tree build one wheel; each light extra installs alone, all of them in one
empty environment load what they bring; and the core runs in every Python of 3.11 or newer that is here. Where nvcc is,
the same of a platform wheel. `--dist FOLDER` checks the sdist and the wheels there. Prints a line for each check; the
first that fails ends it.
"""

import argparse
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

from mmpack.ops import recipe

ROOT = Path(__file__).resolve().parents[2]
FATBIN = bytes.fromhex("50ed55ba")  # what a block of GPU code begins with

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
for room in (mp, mp.video):
    for name in room.__all__:
        try:
            getattr(room, name)
        except mp.MissingExtraError as error:  # and no other error
            assert isinstance(error, ImportError) and "\\n" not in str(error), error
            assert str(error).endswith("Fix: pip install 'mmpack[torch]'"), error
            need_torch.append(name)
assert {"pack", "policy_loss", "pack_video", "probe"} <= set(need_torch), need_torch
assert not {"validate", "plan", "compare", "sample"} & set(need_torch), need_torch
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
    (("init", "loop", "started"), 0, None),
    (("init", "loop", "started"), 2, None),
]
# One resolution for all of these, so that each has one; those of the frameworks exclude one another.
# What they bring, by the module that is imported. Torch and what needs it is left to the resolution below.
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
TOGETHER = "cli,parquet,zstd,data,video,decord,torchcodec,triton,fa4,fla,view,smoke,trl"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--dist", type=Path, help="where an sdist and its wheel are; else they are built"
    )
    parser.add_argument(
        "--platform-wheel", type=Path, metavar="FOLDER", help="only build one there, where nvcc is"
    )
    options = parser.parse_args()
    dist = options.dist
    with tempfile.TemporaryDirectory(prefix="mmpack-wheel-") as folder:
        work = Path(folder)
        if options.platform_wheel is not None:
            made = built_platform_wheel(work)
            if made is not None:
                shutil.copy(made, options.platform_wheel)
            print(made.name if made is not None else "no nvcc here: no platform wheel")
            return
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
        build = (python, "-m", "mmpack.ops.build")
        one_line(run(*build, cwd=work, exit_code=2), "torch")
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

        install(python, f"{wheel}[{TOGETHER}]", "--dry-run")
        print(f"pip resolves [{TOGETHER}]")
        check_light_extras(work, wheel)
        check_pythons(work, wheel, version)

        binary = built_platform_wheel(work) if dist is None else platform_wheel(dist)
        if binary is None:
            print("no nvcc here, or no platform wheel there: none is checked")
            return
        check_platform_contents(binary, wheel)
        check_choice(work, wheel, binary)
        check_pythons(work, binary, version)


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


def built_platform_wheel(work: Path) -> Path | None:
    """With csrc/ compiled, beside the torch of this environment; None where there is no nvcc."""
    if recipe.nvcc() is None:
        return None
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet")
    run(*pip, "--target", work / "hatchling", "hatchling", cwd=work)
    build = (sys.executable, "-m", "build", "--wheel", "--no-isolation", "--skip-dependency-check")
    build = (*build, "--outdir", str(work / "binary"), str(ROOT))
    found = {"PYTHONPATH": str(work / "hatchling")}
    refused = run(*build, cwd=work, exit_code=1, **found, MMPACK_BUILD_CSRC="yes")
    assert "MMPACK_BUILD_CSRC is 'yes'. Fix: set 1, or nothing" in refused.stdout + refused.stderr
    run(*build, cwd=work, **found, MMPACK_BUILD_CSRC="1")
    return platform_wheel(work / "binary")


def platform_wheel(dist: Path) -> Path | None:
    return next(dist.resolve().glob("*-py3-none-manylinux_*.whl"), None)


def check_platform_contents(binary: Path, wheel: Path) -> None:
    """It is the other wheel and one library: of these sources, for the GPUs of its name, with the glibc of its tag."""
    sources = ROOT / "mmpack" / "_csrc"
    compiler = recipe.nvcc()
    assert compiler is not None, "no nvcc: of which CUDA the library should be is not known"
    place = recipe.place(sources, recipe.cuda_version(compiler), recipe.WHEEL)
    library = f"mmpack/_csrc/built/{place.as_posix()}"
    with zipfile.ZipFile(binary) as one, zipfile.ZipFile(wheel) as other:
        packed = {name for name in one.namelist() if ".dist-info/" not in name}
        assert packed == {n for n in other.namelist() if ".dist-info/" not in n} | {library}, packed
        same = packed - {library}
        assert all(one.read(name) == other.read(name) for name in same)
        data = one.read(library)
    codes = fatbin_codes(data)
    assert codes == set(recipe.WHEEL), codes
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / recipe.LIBRARY
        path.write_bytes(data)
        asked = run("readelf", "--wide", "--dynamic", "--version-info", path, cwd=ROOT).stdout
    needed = set(re.findall(r"\(NEEDED\).*\[(.*?)\]", asked)) - {"libc.so.6", "libm.so.6"}
    torch_and_cuda = {"libtorch_cuda.so", "libtorch_cpu.so", "libcudart.so.13"}
    assert needed == torch_and_cuda | {"libstdc++.so.6", "libgcc_s.so.1"}, needed
    assert "RPATH" not in asked and "RUNPATH" not in asked, "a library of this machine is named"
    newest = max(tuple(map(int, found)) for found in re.findall(r"GLIBC_(\d+)\.(\d+)", asked))
    assert "manylinux_{}_{}_".format(*newest) in binary.name, newest
    print(f"{binary.name}: the same files and {library}, {len(data) / 2**20:.1f} MiB")


def fatbin_codes(data: bytes) -> set[str]:
    """The codes in a library's blocks of GPU code, by the headers of their entries: kind 1 is PTX, 2 machine code."""
    found = set()
    start = data.find(FATBIN)
    while start >= 0:
        (size,) = struct.unpack_from("<Q", data, start + 8)
        at, stop = start + 16, start + 16 + size
        while at < stop:
            kind, _, header, payload = struct.unpack_from("<HHIQ", data, at)
            (number,) = struct.unpack_from("<I", data, at + 28)
            found.add(f"{ {1: 'compute', 2: 'sm'}[kind] }_{number}")
            at += header + payload
        start = data.find(FATBIN, stop)
    return found


def check_choice(work: Path, wheel: Path, binary: Path) -> None:
    """Of an index that has both, pip takes the platform wheel where it fits, and the other one elsewhere."""
    index = work / "index"
    index.mkdir()
    for path in (wheel, binary):
        shutil.copy(path, index)
    pip = (sys.executable, "-m", "pip", "--isolated", "--disable-pip-version-check", "download")
    pip = (*pip, "--quiet", "--no-deps", "--no-index", "--find-links", str(index), "mmpack")
    for there, wanted in (((), binary), (("--platform", "manylinux_2_17_x86_64"), wheel)):
        chosen = work / f"chosen-{len(there)}"
        run(*pip, *there, *(("--only-binary", ":all:") if there else ()), "-d", chosen, cwd=work)
        assert [path.name for path in chosen.iterdir()] == [wanted.name]
    print("of both wheels pip takes the platform's where it fits, else the other one")


def check_one_wheel(work: Path, wheel: Path) -> None:
    """The wheel that the tree builds by itself is the one that came through the sdist, byte for byte."""
    straight = work / "straight"
    run(sys.executable, "-m", "build", "--wheel", "--outdir", str(straight), str(ROOT), cwd=work)
    (other,) = straight.glob("*.whl")
    assert other.name == wheel.name and other.read_bytes() == wheel.read_bytes(), other.name
    print("sdist and tree build the same wheel, byte for byte")


def check_light_extras(work: Path, wheel: Path) -> None:
    """pip resolves each of them alone; in an empty environment with all of them, what each brings loads."""
    venv.create(work / "light", with_pip=True)
    python = work / "light" / "bin" / "python"
    for extra in LIGHT:
        install(python, f"{wheel}[{extra}]", "--dry-run")
    install(python, f"{wheel}[{','.join(LIGHT)}]")
    names = sorted({*LIGHT.values()})
    run(python, "-c", f"import mmpack, {', '.join(names)}", cwd=work)
    print(f"extras by themselves: {', '.join(LIGHT)}")


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
    """The files of mmpack/, the manual page and no others are in the wheel, byte for byte (of a link, its target)."""
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


def install(python: Path, requirement: str, *options: str) -> None:
    constraints = str(ROOT / "constraints.txt")
    pip = (python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", *options)
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
