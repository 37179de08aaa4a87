"""Sampling policies, one per file, each equal to what upstream code of that name does."""
