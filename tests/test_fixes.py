"""What every error ends with: "Fix: " and a verb, or a command line to type."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FIX = re.compile(r"Fix: ([^(\s\"'`{,.;:]*)(.?)")
COMMANDS = {"apt-get", "pip", "python"}
NO_VERB = {"a", "an", "another", "fewer", "more", "no", "not", "one", "or", "some", "the", "this"}


def first_words():
    """(file, word) of each fix; what begins with a value or a quotation is not read."""
    for path in [*ROOT.glob("mmpack/**/*.py"), ROOT / "Makefile"]:
        for word, after in FIX.findall(path.read_text(encoding="utf-8")):
            if word:
                yield path.relative_to(ROOT).as_posix(), word, after


def test_a_fix_begins_with_a_verb():
    found = [*first_words()]
    assert len(found) > 1000
    wrong = [
        (path, word)
        for path, word, after in found
        if word not in COMMANDS
        and (word in NO_VERB or not re.fullmatch("[a-z]+(_?[a-z]+)*", word) or after == ".")
    ]
    assert wrong == []
