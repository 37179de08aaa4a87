"""What the site adds to pages: the tree, made of docs/index.md's lists, and links from names in code."""

import re

from docutils import nodes
from sphinx import addnodes

INDEX = "docs/index"
# pages whose own links are no list: below them goes what the pattern names
BELOW = {
    "docs/performance": ["/benchmarks/results/*", "/benchmarks/scale"],
    "docs/consistency": ["/tests/chain/README"],
    "docs/trace": ["/tests/rfc/README"],
}
# what people type into the search -> the page that answers it, which then comes first
ANSWERS = {
    "docs/kept_ids": ("top-p", "top-k", "min-p", "sampling mask"),
    "docs/faq": ("empty response", "image tokens do not match", "importance ratio", "padding side"),
    "docs/video": ("video GRPO", "frame sampling", "fps"),
    "docs/trl": ("GRPOTrainer", "GRPO with TRL"),
    "docs/parity": ("something differs", "mismatch", "logprobs differ"),
    "docs/routes": ("routing replay", "mixture of experts", "MoE"),
    "docs/memory": ("out of memory", "OOM"),
    "docs/losses": ("KL", "clip", "DAPO", "GSPO", "CISPO"),
    "docs/packing": ("attention mask", "padding", "shared prefix"),
    "docs/verl": ("verl", "VeOmni"),
    "docs/adapters": ("OpenRLHF", "slime", "vime", "sglang"),
    "docs/engines": ("vLLM",),
    "docs/ranks": ("FSDP", "DDP", "DeepSpeed", "tensor parallel"),
    "docs/teachers": ("distillation",),
    "docs/trajectories": ("agent", "multi-turn"),
}
SECTION = re.compile(r"^## (.+)\n\n((?:- .*\n(?:  .*\n)*)+)", re.MULTILINE)
LINK = re.compile(r"^- \[([^]]+)\]\(([^)#]+)\.md\)", re.MULTILINE)
NAME = re.compile(r"(?:mp|mmpack)\.([A-Za-z_][\w.]*)(?:\(.*\))?")
RULES = "docs/rules"
ANCHOR = re.compile(r'<a id="(\w+)">')
CODE = re.compile(r"\b(MM\d{3})\b")
REFERENCE = "- [API](api/index.md): every public name, with shapes, units and errors.\n"


def with_answers(app, name: str, source: list[str]) -> None:
    """Add the queries that a page answers to its index, below its title."""
    if name in ANSWERS:
        entries = ", ".join(f"! {query}" for query in ANSWERS[name])
        title, _, rest = source[0].partition("\n")
        source[0] = f"{title}\n\n```{{index}} {entries}\n```\n{rest}"


def with_tree(app, name: str, source: list[str]) -> None:
    """Add toctrees that don't show on the page itself."""
    if name == INDEX:
        text = source[0].replace("## Reference\n\n", "## Reference\n\n" + REFERENCE)
        for title, links in SECTION.findall(text):
            text += toctree([f"{a} <{b}>" for a, b in LINK.findall(links)], caption=title)
        source[0] = text
    elif name in BELOW:
        source[0] += toctree(BELOW[name], glob=True)


def toctree(entries: list[str], caption: str = "", glob: bool = False) -> str:
    options = ":hidden:\n" + ":glob:\n" * glob + f":caption: {caption}\n" * bool(caption)
    return "\n```{toctree}\n" + options + "\n" + "\n".join(entries) + "\n```\n"


def link_names(doctree: nodes.document, names: set[str]) -> None:
    """Turn code that is one public name, such as `mp.pack(…)`, into a link to it."""
    for node in list(doctree.findall(nodes.literal)):
        found = NAME.fullmatch(node.astext())
        if found is None or f"mmpack.{found[1]}" not in names or in_link(node):
            continue
        link = addnodes.pending_xref(
            "", refdomain="py", reftype="obj", reftarget=f"mmpack.{found[1]}", refexplicit=True
        )
        node.parent.replace(node, link)
        link += node


def name_rows(app, doctree: nodes.document) -> None:
    """Let links name a row of a table by its anchor, such as rules.md#MM101."""
    slugs = app.env.metadata[app.env.docname].setdefault("myst_slugs", {})
    for node in doctree.findall(nodes.raw):
        for anchor in ANCHOR.findall(node.astext()):
            slugs.setdefault(anchor, (node.line, anchor, anchor))


def link_rules(app, doctree: nodes.document, docname: str) -> None:
    """Turn codes such as MM101 into links to their rows in docs/rules.md."""
    if docname == RULES:
        return
    uri = app.builder.get_relative_uri(docname, RULES)
    for node in list(doctree.findall(nodes.Text)):
        parts = CODE.split(node.astext())
        if len(parts) == 1 or in_link(node) or in_block(node):
            continue
        linked = [
            nodes.reference("", part, refuri=f"{uri}#{part}", internal=True)
            if k % 2
            else nodes.Text(part)
            for k, part in enumerate(parts)
        ]
        node.parent.replace(node, linked)


def in_block(node: nodes.Node) -> bool:
    return isinstance(node.parent, nodes.literal_block)


def in_link(node: nodes.Node | None) -> bool:
    while node is not None:
        if isinstance(node, nodes.reference | addnodes.pending_xref | nodes.title):
            return True
        node = node.parent
    return False
