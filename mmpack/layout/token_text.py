"""The text of tokens [L], and which tokens each of its characters comes from.

A byte-level token may hold a part of a character: bytes are joined first, then decoded. Indices of tokens are those of
the whole sample; indices of characters count from the start of the text.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np

from mmpack.errors import ArgumentError, check_whole, kind_of

UNKNOWN = b"\xff"  # of an id without a token: decodes to one U+FFFD, whatever stands around it


@dataclass(frozen=True, eq=False)
class TokenText:
    """What `token_text` returns. T tokens, C characters."""

    text: str
    token_of: np.ndarray  # int64 [C]: the token of the sample that holds the character's first byte
    starts: np.ndarray  # int64 [T+1]: the character in which each token begins; the last is C
    start: int  # the first token
    last_of: np.ndarray = field(repr=False)  # int64 [C]: the token of the character's last byte

    def span(self, char_start: int, char_stop: int) -> tuple[int, int]:
        """[start, stop) of the tokens of the sample that hold any byte of characters [char_start, char_stop).

        Neighbouring spans share a token where one straddles their boundary. An empty range gives an empty span.
        Raises: ArgumentError where the range is not within the text.
        """
        if not 0 <= char_start <= char_stop <= len(self.text):
            raise ArgumentError(
                f"TokenText.span: [{char_start}, {char_stop}) is not within the {len(self.text)} characters. "
                "Fix: count characters of .text"
            )
        if char_start == char_stop:
            at = self.stop if char_start == len(self.text) else int(self.token_of[char_start])
            return at, at
        return int(self.token_of[char_start]), int(self.last_of[char_stop - 1]) + 1

    def chars(self, token_start: int, token_stop: int) -> tuple[int, int]:
        """[start, stop) of the characters that have any byte in tokens [token_start, token_stop) of the sample.

        Raises: ArgumentError where the range is not within the tokens.
        """
        if not self.start <= token_start <= token_stop <= self.stop:
            raise ArgumentError(
                f"TokenText.chars: [{token_start}, {token_stop}) is not within [{self.start}, {self.stop}). "
                "Fix: count tokens of the sample, within those that were decoded"
            )
        first = int(np.searchsorted(self.last_of, token_start, "left"))
        return first, max(first, int(np.searchsorted(self.token_of, token_stop, "left")))

    @property
    def stop(self) -> int:
        """One past the last token."""
        return self.start + len(self.starts) - 1


def token_text(
    input_ids: Sequence[int] | np.ndarray, tokenizer: Any, start: int = 0, stop: int | None = None
) -> TokenText:
    """The text of `input_ids[start:stop]`, special tokens included, with the tokens of each character.

    Args: `input_ids`: int [L]. `tokenizer`: of transformers or tokenizers, with a byte-level vocabulary (Qwen,
    InternVL, GPT-2), or a function from an id to its bytes, None where it has no token. `start`, `stop`: tokens, by
    default all.
    Exact: the text is what the bytes of the tokens decode to as UTF-8. Bytes that are none, and ids that have no token,
    become U+FFFD, one per longest wrong run (as Unicode recommends, and decoders do).
    Raises: ArgumentError for ids that are no integers of 0 or more, a range beyond them, or a tokenizer that is not
    byte-level.

    Example:
        >>> from mmpack.layout.token_text import token_text
        >>> pieces = [b"at (", b"12", b"),\\xe6", b"\\xb7\\xb1"]
        >>> text = token_text([0, 1, 2, 3], pieces.__getitem__)
        >>> text.text, text.token_of.tolist()
        ('at (12),深', [0, 0, 0, 0, 1, 1, 2, 2, 2])
        >>> text.span(4, 6), text.span(8, 9)
        ((1, 2), (2, 4))
    """
    ids = _ids(input_ids)
    check_whole("token_text", "start", start, least=0)
    if stop is not None:
        check_whole("token_text", "stop", stop, least=0)
    stop = len(ids) if stop is None else stop
    if not start <= stop <= len(ids):
        raise ArgumentError(
            f"token_text: [{start}, {stop}) is not within the {len(ids)} tokens. "
            "Fix: pass 0 <= start <= stop <= their number"
        )
    found, which = np.unique(ids[start:stop], return_inverse=True)
    bytes_of = token_bytes(tokenizer)
    pieces = [_piece(bytes_of, i) for i in found.tolist()]
    raw = b"".join([pieces[k] for k in which.tolist()])
    sizes = np.array([len(piece) for piece in pieces], np.int64)
    token_ends = np.cumsum(sizes[which]) if len(pieces) else np.zeros(0, np.int64)

    text, widths = _decoded(raw)
    char_ends = np.cumsum(widths)
    token_of = np.searchsorted(token_ends, char_ends - widths, "right") + start
    last_of = np.searchsorted(token_ends, char_ends - 1, "right") + start
    token_starts = np.concatenate([[0], token_ends])
    starts = np.searchsorted(char_ends, token_starts, "right")
    return TokenText(text, token_of, starts, start, last_of)


def token_bytes(tokenizer: Any) -> Callable[[int], bytes | None]:
    """The function from an id to its bytes, None where it has no token. Raises: ArgumentError, see `token_text`."""
    if hasattr(tokenizer, "tokenizer"):
        raise ArgumentError(
            f"token_text: tokenizer is {kind_of(tokenizer)}, which holds a tokenizer. Fix: pass its .tokenizer"
        )
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if not hasattr(backend, "id_to_token"):
        if callable(tokenizer) and not hasattr(tokenizer, "convert_ids_to_tokens"):
            return tokenizer
        raise _not_byte_level(kind_of(tokenizer))
    if not _is_byte_level(backend.decoder):
        raise _not_byte_level(f"{kind_of(tokenizer)} whose decoder is not ByteLevel")
    added = {i: token.content.encode() for i, token in backend.get_added_tokens_decoder().items()}
    byte_of = {letter: byte for byte, letter in byte_letters().items()}

    def bytes_of(token_id: int) -> bytes | None:
        if token_id in added:
            return added[token_id]
        letters = backend.id_to_token(token_id)
        return None if letters is None else bytes(map(byte_of.__getitem__, letters))

    return bytes_of


@cache
def byte_letters() -> dict[int, str]:
    """For str.translate: the printable letter that stands for each byte in a byte-level vocabulary (GPT-2's alphabet).

    Printable Latin-1 stands for itself; the other bytes take the letters from U+0100 on, in order.
    """
    hidden = [
        byte for byte in range(256) if not (33 <= byte <= 126 or 161 <= byte <= 172 or byte >= 174)
    ]
    letters = {byte: chr(byte) for byte in range(256)}
    return letters | {byte: chr(256 + i) for i, byte in enumerate(hidden)}


# ---- ids and bytes -------------------------------------------------------------------------------


def _ids(input_ids: Any) -> np.ndarray:
    try:
        ids = np.asarray(input_ids)
    except Exception:
        ids = np.empty((0, 0))
    if ids.ndim == 1 and not len(ids):
        return np.zeros(0, np.int64)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ArgumentError(
            f"token_text: input_ids is {kind_of(input_ids)} of shape {list(ids.shape)} and dtype {ids.dtype}, "
            "expected integers [L]. Fix: pass the ids of one sample"
        )
    if int(ids.min()) < 0:
        raise ArgumentError(
            f"token_text: input_ids holds {int(ids.min())}, and ids are 0 or more. Fix: leave out padding and -100"
        )
    return ids


def _piece(bytes_of: Callable[[int], bytes | None], token_id: int) -> bytes:
    try:
        piece = bytes_of(token_id)
    except (LookupError, OverflowError):  # OverflowError: beyond what the vocabulary's ids can be
        piece = None
    if piece is None:
        return UNKNOWN
    if not isinstance(piece, bytes):
        raise ArgumentError(
            f"token_text: tokenizer({token_id}) gave {kind_of(piece)}, expected bytes. "
            "Fix: pass a function from an id to its bytes, or a tokenizer of transformers"
        )
    return piece


def _is_byte_level(decoder: Any) -> bool:
    if decoder is None:
        return False
    state = json.loads(decoder.__getstate__())
    return any(d.get("type") == "ByteLevel" for d in [state, *state.get("decoders", ())])


def _not_byte_level(what: str) -> ArgumentError:
    return ArgumentError(
        f"token_text: tokenizer is {what}, whose tokens have no bytes. "
        "Fix: pass a tokenizer of transformers with a byte-level vocabulary, or a function from an id to its bytes"
    )


# ---- bytes to characters -------------------------------------------------------------------------


def _decoded(raw: bytes) -> tuple[str, np.ndarray]:
    """The text, and int64 [C] bytes of each character.

    A wrong run of n bytes is decoded to the lone surrogate U+DC00 + n, which UTF-8 can't hold.
    """
    marked = raw.decode("utf-8", _MARK)
    codes = np.frombuffer(marked.encode("utf-32-le", "surrogatepass"), "<u4").astype(np.int64)
    widths = 1 + (codes >= 0x80) + (codes >= 0x800) + (codes >= 0x10000)
    wrong = (codes >= 0xDC00) & (codes < 0xE000)
    if wrong.any():
        widths[wrong] = codes[wrong] - 0xDC00
        codes[wrong] = 0xFFFD
        marked = codes.astype("<u4").tobytes().decode("utf-32-le")
    return marked, widths


def _mark(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return chr(0xDC00 + error.end - error.start), error.end


_MARK = "mmpack.token_text"
codecs.register_error(_MARK, _mark)
