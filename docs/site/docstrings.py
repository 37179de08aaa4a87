"""Docstrings as Markdown: what they are written in, but for lists of arguments and examples."""

import re

HEAD = re.compile(r"(Args|Returns|Raises|Yields|Metrics|Examples?)\b(.*)")
ENTRY = re.compile(r"    (\w[\w, *]*): (.*)")
CODE = re.compile(r"(`[^`]*`)")


def markdown(text: str) -> str:
    """A docstring, dedented, as Markdown."""
    out: list[str] = []
    lines = text.splitlines()
    args = False
    while lines:
        line = lines.pop(0)
        if line.lstrip().startswith(">>> "):
            block = [line]
            while lines and lines[0].strip():
                block.append(lines.pop(0))
            indent = len(line) - len(line.lstrip())
            out += ["", "```pycon", *(code[indent:] for code in block), "```", ""]
        elif line == "Args:":
            out += ["", "**Args**", ""]
            args = True
        elif args and (entry := ENTRY.fullmatch(line)):
            names = ", ".join(f"`{name.strip()}`" for name in entry[1].split(","))
            out.append(f"- {names}: {escaped(entry[2])}")
        elif args and line.startswith("    "):
            out.append("  " + escaped(line.strip()))
        else:
            args = args and not line
            head = HEAD.fullmatch(line)
            if head and head[2][:1] in (":", " ", ""):
                out += ["", f"**{head[1]}**{escaped(head[2])}"]
            else:
                out.append(escaped(line))
    return "\n".join(out).strip() + "\n"


def escaped(line: str) -> str:
    """Stars and angle brackets mean themselves outside of code."""
    parts = CODE.split(line)
    return "".join(
        part if k % 2 else re.sub(r"([<*](?! ))|(?<!^)\*", r"\\\g<0>", part)
        for k, part in enumerate(parts)
    )
