"""The trace of fixtures/gui, its media root, and a tokenizer from ids to bytes that needs no vocabulary."""

from pathlib import Path

import mmpack as mp

FOLDER = Path(__file__).resolve().parents[2] / "fixtures/gui"
TRACE = FOLDER / "trace.jsonl"


def samples():
    return list(mp.read_trace(TRACE))


def words(token_id):
    """Bytes of a made-up token: letters, a line end, and a character of three bytes over two tokens."""
    if token_id % 7 == 3:
        return b"\n"
    if token_id % 7 in (4, 5):
        return [b"\xe6", b"\xb7\xb1"][token_id % 7 - 4]
    return f"w{token_id} ".encode()
