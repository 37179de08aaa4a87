"""Samples of any trace as pictures: a page (page.py) and a figure for a paper (figure.py).

Both draw what these files find out: roles.py (what a token is), scores.py (which tokens a score is about), episodes.py
(which samples continue which), places.py (where boxes and clicks lie on a picture). Broken samples are drawn as far as
they go: spans are cut at the ids.
"""
