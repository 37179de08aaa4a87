"""The HTML of parts: whatever text a part holds stays text, in elements and in attributes."""

from support.html_page import Page

from mmpack.view import pages
from mmpack.view import parts as of

EVIL = "\"><script>evil=1</script>'onload=evil </style></title></svg>\x1b[31m\u202e\n"


def test_no_part_lets_text_become_markup():
    shapes = [
        of.Box(0, 0, 1, 1, EVIL, EVIL),
        of.Stroke(0, 0, 1, 1, EVIL),
        of.Curve([(0, 0), (1, 1)], EVIL, dashed=True),
        of.Ring(0, 0, EVIL),
        of.Word(0, 0, EVIL, EVIL, EVIL),
    ]
    drawing = of.Drawing(shapes, 1, EVIL, style=EVIL)
    styled = of.Styled(EVIL, "span", EVIL)
    parts = [
        of.Heading(EVIL, 2, EVIL, [styled]),
        of.Line([EVIL, styled]),
        of.Table((EVIL,), [[EVIL], [styled], [drawing], [None]], EVIL),
        of.Key([(EVIL, EVIL)]),
        of.Key([(EVIL, EVIL)], curves=True),
        drawing,
        of.Grid([of.Figure(EVIL, drawing, EVIL, EVIL)], EVIL),
        of.Card([of.Line(EVIL)]),
        of.Folded(EVIL, [of.Line(EVIL)]),
        of.Tokens(EVIL, [[of.Cell(EVIL, EVIL), of.Cell(EVIL, EVIL, EVIL, EVIL)]]),
    ]
    assert {type(part) for part in parts} == set(of.Part.__args__)
    html = pages.page(EVIL, parts)
    page = Page(html)
    assert {tag for tag, _ in page.tags}.isdisjoint({"script", "img"})
    assert not [name for _, a in page.tags for name in a if name.startswith("on")]
    assert "\x1b" not in html and "\u202e" not in html and html.count("</style>") == 1
    assert "<script>evil=1</script>" in "".join(page.text)
