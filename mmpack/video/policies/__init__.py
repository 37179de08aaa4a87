"""Sampling policies, one a file, each equal to what upstream code of that name does."""
