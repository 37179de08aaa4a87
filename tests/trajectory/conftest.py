"""Real processors: see support/real_processors.py."""

from support.real_processors import hf, make_hf, picture, processor, qwen_tok  # noqa: F401
