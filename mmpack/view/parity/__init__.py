"""A parity report as HTML: one self-contained page without scripts, or a fragment for a notebook.

Everything that came from a trace goes through `tags.text`. Styles are only classes, so that the page's policy allows
its one style sheet, by hash, and nothing else.
"""
