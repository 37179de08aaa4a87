"""A kernel has no pages: nothing is drawn in a notebook."""


class Drawn:
    """A base that has nothing."""
