"""The examples in docstrings print what they say, each in a namespace of its own; central functions have one."""

import doctest
import importlib
import re
from operator import attrgetter
from pathlib import Path

import pytest
from support.process import run_python

import mmpack as mp
from mmpack.families import FAMILIES

ROOT = Path(__file__).resolve().parents[1]
PROMPT = re.compile(r"^\s*>>> ", re.MULTILINE)
# what data-loader workers use: without torch
LIGHT = tuple(
    f"mmpack.{name}"
    for name in (
        *("errors", "contracts", "files", "families", "schema"),
        *("layout", "planning", "parity.compare"),
    )
)
CENTRAL = (
    *("Sample", "validate", "read_trace", "mrope_positions", "compare", "plan"),
    *("pack", "pad", "collate", "selected_logprobs", "linear_selected_logprobs"),
    *("merge_embeddings", "scatter_rewards", "group_advantages", "group_numbers", "gae"),
    *("policy_loss", "value_loss", "discounted_returns"),
)
CENTRAL_IN_ROOMS = (
    *(
        "ops.project_and_merge",
        "losses.turns_of",
        "losses.turn_advantages",
        "losses.gather_rewards",
    ),
    *("losses.score_advantages", "losses.score_columns", "losses.linear_length_scores"),
    *("losses.group_length_scores", "losses.cosine_length_scores", "losses.soft_overlong_scores"),
)


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


# module -> how many lines with a prompt its file has
PROMPTS = {
    module_name(path): len(found)
    for path in sorted(ROOT.glob("mmpack/**/*.py"))
    if (found := PROMPT.findall(path.read_text(encoding="utf-8")))
}


def run_examples(name: str) -> int:
    """Run all examples of a module; returns how many there are. Raises where one prints something else."""
    count = 0
    finder = doctest.DocTestFinder(exclude_empty=True)
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    runner = doctest.DebugRunner(optionflags=flags)
    # no names of the module: an example imports what it uses
    for test in finder.find(importlib.import_module(name), globs={"__name__": "__main__"}):
        count += len(test.examples)
        known = dict(FAMILIES)
        runner.run(test)
        FAMILIES.clear()  # an example may register one
        FAMILIES.update(known)
    return count


@pytest.mark.parametrize("name", PROMPTS)
def test_examples_print_what_they_say(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run_examples(name) == PROMPTS[name]  # none is where doctest doesn't look


def test_examples_of_the_schema_side_need_no_torch(tmp_path):
    names = [name for name in PROMPTS if name.startswith(LIGHT)]
    code = (
        "import sys; sys.modules.update(dict.fromkeys(('torch', 'transformers')))\n"
        "from test_doctests import run_examples\n"
        "for name in sys.argv[1:]: run_examples(name)"
    )
    path = [str(ROOT), str(ROOT / "tests")]
    result = run_python(f"import sys; sys.path[:0] = {path!r}\n{code}", *names, cwd=tmp_path)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("name", (*CENTRAL, *CENTRAL_IN_ROOMS))
def test_central_functions_show_an_example(name):
    assert PROMPT.search(attrgetter(name)(mp).__doc__ or "")
