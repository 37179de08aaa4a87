"""A page of HTML as tests read it."""

from html.parser import HTMLParser

VOID = ("meta", "br")


class Page(HTMLParser):
    """Tags with attributes, texts, the texts of each class; refuses tags that are not closed in order."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.open, self.text, self.by_class = [], [], [], {}
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append((tag, dict(attrs).get("class") or ""))

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        if self.open and self.open[-1][0] not in ("style", "script"):
            self.text.append(data)
            for name in {c for _, classes in self.open for c in classes.split()}:
                self.by_class.setdefault(name, []).append(data)

    def all(self, name, **attributes):
        return [a for tag, a in self.tags if tag == name and attributes.items() <= a.items()]

    def rows(self):
        return [a for a in self.all("div") if "row" in (a.get("class") or "").split()]
