"""The GitHub action, the release and the pre-commit hook: their shell lines run here as their runners run them."""

import json
import os
import re
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from support.samples import full_sample

import mmpack as mp

ROOT = Path(__file__).resolve().parents[1]
ACTION = ROOT / ".github" / "actions" / "parity"
STEPS = yaml.safe_load((ACTION / "action.yml").read_text(encoding="utf-8"))
RELEASE = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text("utf-8"))[
    "jobs"
]
_EVERY = STEPS["runs"]["steps"] + RELEASE["build"]["steps"]
LINES = {step["name"]: step for step in _EVERY if "name" in step}
(HOOK,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8"))
HOSTILE = "s0```<b>$(touch hit)`touch hit` ##[error]boo ::error::boo"


def command(folder):
    """A `mmpack` of this Python."""
    folder.mkdir(parents=True)
    file = folder / "mmpack"
    file.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m mmpack "$@"\n')
    file.chmod(0o755)


def step(name, folder, **env):
    """One step, as GitHub runs a step with `shell: bash`."""
    files = {"GITHUB_STEP_SUMMARY": folder / "summary", "GITHUB_OUTPUT": folder / "output"}
    settings = {k: str(v) for k, v in ({"RUNNER_TEMP": folder} | files | env).items()}
    script = folder / "step.sh"
    script.write_text(LINES[name]["run"])
    shell = ["bash", "--noprofile", "--norc", "-eo", "pipefail", str(script)]
    done = subprocess.run(
        shell, cwd=folder, env=os.environ | settings, capture_output=True, text=True, check=False
    )
    read = {key: path.read_text() if path.exists() else "" for key, path in files.items()}
    return done, read["GITHUB_STEP_SUMMARY"], read["GITHUB_OUTPUT"].split()


@pytest.fixture
def traces(tmp_path):
    command(tmp_path / "mmpack" / "bin")
    sample = full_sample(HOSTILE)
    ids = sample.input_ids.copy()
    ids[0] += 1
    for name, one in (("a b", sample), ("other", replace(sample, input_ids=ids))):
        mp.write_trace(tmp_path / f"{name}.jsonl", [one])
    given = {"ROLLOUT": "a b.jsonl", "REQUIRE": "input_ids", "MEDIA_ROOT": ""}
    return tmp_path, given


def commands(text):
    """What GitHub's runner takes for commands: src/Runner.Common/ActionCommand.cs."""
    return [x for x in text.splitlines() if x.lstrip().startswith("::") or re.search(r"##\w*\[", x)]


PAGE = "https://github.com/o/r/actions/runs/1/artifacts/2"


def test_equal_sides(traces):
    folder, given = traces
    done, summary, output = step("Compare", folder, TRAIN="a b.jsonl", **given)
    assert done.returncode == 0, done
    assert output == ["ok=true", "code=0"] and "\n    OK: " in summary
    assert json.loads((folder / "mmpack-parity" / "parity.json").read_text())["ok"] is True
    assert (folder / "mmpack-parity" / "parity.html").read_text().startswith("<!doctype html>")
    assert step("Verdict", folder, CODE=0)[0].returncode == 0


def test_sides_that_differ_fail_the_job_after_their_page_is_kept(traces):
    folder, given = traces
    done, summary, output = step("Compare", folder, TRAIN="other.jsonl", **given)
    assert done.returncode == 0 and output == ["ok=false", "code=1"], done
    stop, start = commands(done.stdout + done.stderr)  # no text of a trace is a command of the log
    assert stop.startswith("::stop-commands::") and start == f"::{stop.rpartition(':')[2]}::"
    assert "DIFFERENT" in summary and not (folder / "hit").exists()
    body = summary.split("\n\n", 1)[1]
    assert all(line.startswith("    ") for line in body.splitlines())
    assert step("Verdict", folder, CODE=1)[0].returncode == 1
    # with a `gh` that writes down what it is asked for
    gh = folder / "path" / "gh"
    gh.parent.mkdir()
    gh.write_text(f'#!/bin/sh\nprintf "%s\\n" "$*" > "{folder}/asked"\n')
    gh.chmod(0o755)
    paths = f"{gh.parent}:{os.environ['PATH']}"
    env = {"PULL_REQUEST": 7, "REPOSITORY": "o/r", "PAGE": PAGE, "PATH": paths}
    done, _, _ = step("Comment", folder, **env)
    assert done.returncode == 0, done
    *asked, body = (folder / "asked").read_text().split()
    assert asked == ["pr", "comment", "7", "--repo", "o/r", "--body-file"]
    head, text = Path(body).read_text().split(f"]({PAGE})\n\n")
    assert head.startswith("### mmpack parity") and "DIFFERENT" in text
    assert all(line.startswith("    ") and len(line) < 510 for line in text.splitlines())
    # a comment only for who asked for it, and only where the sides differ
    assert STEPS["inputs"]["comment"]["default"] == "false"
    said = LINES["Comment"]["if"]
    assert "inputs.comment == 'true'" in said and "outputs.code == '1'" in said
    order = [[*LINES].index(name) for name in ("Keep the page", "Comment", "Verdict")]
    assert order == sorted(order)


def test_findings_become_annotations(traces):
    folder, given = traces
    done, _, _ = step("Annotate", folder, TRAIN="other.jsonl", **given)
    assert done.returncode == 0 and not (folder / "hit").exists(), done
    (line,) = commands(done.stdout + done.stderr)
    assert line.startswith("::error ") and "file=other.jsonl,line=1" in line
    missing, _, _ = step("Annotate", folder, TRAIN="none.jsonl", **given)
    assert missing.returncode == 1 and "does not exist" in missing.stderr


def test_a_trace_that_is_not_there(traces):
    folder, given = traces
    done, summary, output = step("Compare", folder, TRAIN="$(touch hit).jsonl", **given)
    assert done.returncode == 0 and output == ["ok=false", "code=2"], done
    assert "does not exist" in summary and not (folder / "hit").exists()


def test_no_input_becomes_shell():
    """Inputs reach a script as variables: an expression in a script would be run."""
    for name, given in LINES.items():
        assert "${{" not in given.get("run", ""), name
    named = re.findall(r"inputs\.([\w-]+)", (ACTION / "action.yml").read_text(encoding="utf-8"))
    assert set(named) == STEPS["inputs"].keys()


def test_the_install_step_takes_the_lock_and_this_tree(tmp_path):
    """With a `python` that writes down what it is asked for."""
    for path in (tmp_path / "path" / "python", tmp_path / "mmpack" / "bin" / "python"):
        path.parent.mkdir(parents=True)
        path.write_text(f'#!/bin/sh\nprintf "%s\\n" "$*" >> "{tmp_path}/asked"\n')
        path.chmod(0o755)
    paths = f"{tmp_path / 'path'}:{os.environ['PATH']}"
    done, _, _ = step("Install", tmp_path, GITHUB_ACTION_PATH=ACTION, PATH=paths)
    assert done.returncode == 0, done
    _, locked, tree = (tmp_path / "asked").read_text().splitlines()
    assert "--require-hashes" in locked and Path(locked.split()[-1]).is_file()
    assert Path(tree.split()[-1]).resolve() == ROOT and "--no-deps" in tree


def test_the_lock_has_all_that_the_extras_need():
    lines = (ACTION / "requirements.txt").read_text(encoding="utf-8").splitlines()
    locked = [Requirement(line.rstrip(" \\")) for line in lines if "==" in line]
    applying = {r.name.lower(): r for r in locked if r.marker is None or r.marker.evaluate()}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = [*project["dependencies"]]
    for extra in ("cli", "parquet", "zstd", "view"):
        needed += project["optional-dependencies"][extra]
    for given in map(Requirement, needed):
        (pin,) = applying[given.name.lower()].specifier
        assert given.specifier.contains(pin.version), given
    assert sum("--hash=sha256:" in line for line in lines) > len(locked)


def test_the_hook_refuses_what_breaks_a_rule(tmp_path):
    command(tmp_path / "path")
    folder = tmp_path / "traces"
    folder.mkdir()
    mp.write_trace(folder / "good.jsonl", [full_sample()])
    bad = full_sample()
    bad.loss_spans[0].start = 0
    mp.write_trace(folder / "bad.parquet", [bad])
    env = os.environ | {"PATH": f"{tmp_path / 'path'}:{os.environ['PATH']}"}

    def hook(*names):
        line = [*HOOK["entry"].split(), *(f"traces/{name}" for name in names)]
        return subprocess.run(line, cwd=tmp_path, env=env, capture_output=True, text=True)

    assert hook("good.jsonl").returncode == 0
    done = hook("good.jsonl", "bad.parquet")
    assert done.returncode == 1, done
    assert "traces/good.jsonl: OK: " in done.stdout and "traces/bad.parquet: MM" in done.stdout
    for name, taken in [
        ("traces/a.jsonl", True),
        ("x/traces/a.jsonl.zst", True),
        ("a.jsonl", False),
    ]:
        assert bool(re.search(HOOK["files"], name)) is taken


# ---- the release -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tag", "version", "heading", "code"),
    [
        ("v1.2.0", "1.2.0", "## 1.2.0 (2026-12-01)", 0),
        ("v1.2.1", "1.2.0", "## 1.2.0 (2026-12-01)", 1),
        ("v1.2.0", "1.2.0", "## 1.2.0 (not released)", 1),
    ],
)
def test_a_tag_is_the_version_and_has_its_changes(tag, version, heading, code, tmp_path):
    (tmp_path / "mmpack").mkdir()
    (tmp_path / "mmpack" / "_version.py").write_text(f'__version__ = "{version}"\n')
    (tmp_path / "CHANGELOG.md").write_text(f"# Changes\n\n{heading}\n")
    done, _, _ = step("Version", tmp_path, GITHUB_REF_NAME=tag)
    assert (done.returncode, "::error::" in done.stdout) == (code, code == 1)


def test_only_packages_are_published_and_only_by_the_job_that_may(tmp_path):
    """`make release` puts sums and a bill of materials beside them, which PyPI refuses."""
    (tmp_path / "make").write_text(
        "#!/bin/sh\nmkdir dist && cd dist && touch a.whl a.tar.gz SHA256SUMS a.cdx.json\n"
    )
    (tmp_path / "make").chmod(0o755)
    done, _, _ = step("Build", tmp_path, PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert done.returncode == 0, done.stderr
    assert {f.name for f in (tmp_path / "packages").iterdir()} == {"a.whl", "a.tar.gz"}
    allowed = {name: job["permissions"] for name, job in RELEASE.items()}
    assert allowed == {"build": {"contents": "read"}, "publish": {"id-token": "write"}}


def test_a_release_points_the_links_of_its_page_to_the_repository(tmp_path):
    """PyPI shows README alone: links and pictures are those of the tag."""
    (tmp_path / "README.md").write_text((ROOT / "README.md").read_text())
    about = {"GITHUB_REPOSITORY": "o/mmpack", "GITHUB_REF_NAME": "v9.9.9"}
    done, _, _ = step("Links", tmp_path, **about)
    text = (tmp_path / "README.md").read_text()
    assert done.returncode == 0, done
    assert "](https://github.com/o/mmpack/blob/v9.9.9/docs/trl.md)" in text
    assert 'src="https://raw.githubusercontent.com/o/mmpack/v9.9.9/docs/speed.svg"' in text
    assert "OWNER/mmpack" not in text
    assert all(link.startswith("https://") for link in re.findall(r"\]\(([^)]*)\)", text))
