"""Sampling policies: rows of a table (`registry.py`), each equal to what upstream code of that name does."""
