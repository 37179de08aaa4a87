"""Messages to a prompt's text by the chat template, and to expanded ids [L]: one per vision token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from mmpack.errors import ArgumentError, require
from mmpack.processors.arguments import check_messages
from mmpack.processors.expand import expanded_ids, repeated, with_runs
from mmpack.processors.messages import plain_messages
from mmpack.processors.settings import Parts
from mmpack.processors.views import counted, pictures
from mmpack.processors.written import check_read, check_written
from mmpack.schema.media import Medium
from mmpack.schema.spans import LossSpan


class PromptWriter:
    """The chat template and the tokenizer, with media between the words."""

    def __init__(self, parts: Parts):
        self.parts = parts

    def rendered(
        self,
        messages: Sequence[dict[str, Any]],
        options: dict[str, Any],
        since: int = 0,
        invented: int = 0,
        scored: bool = False,
    ) -> str:
        """See `Processor.render`; for `since`, `invented` and `scored` see `check_written`."""
        parts = self.parts
        if parts.chat_template is None:
            raise ArgumentError(
                "processor: there is no chat template. Fix: pass one, wrap_processor(…, chat_template=…)"
            )
        check_messages(messages)
        options = {"add_generation_prompt": True} | options
        signs = dict(zip(parts.family.prompt_ids, self._pads(), strict=True))

        def checked(plain: list[dict[str, Any]]) -> str:
            text = self._text(plain, options)
            if since < len(plain):
                check_written(self._text, plain, options, text, signs, since, invented, scored)
                check_read(self._text, plain, options, text, str(parts.chat_template))
            return text

        plain = plain_messages(messages)
        try:
            return checked(plain)
        except ArgumentError:  # DeepSeek's template, say, reads the arguments of calls as texts
            as_texts = plain_messages(messages, decode=False)
            if as_texts == plain:
                raise
            with suppress(ArgumentError):
                return checked(as_texts)
            raise

    def _text(self, plain: Sequence[dict[str, Any]], options: dict[str, Any]) -> str:
        require("jinja2", "hf", "a chat template")
        try:
            text: str = self.parts.tokenizer.apply_chat_template(
                plain, chat_template=self.parts.chat_template, tokenize=False, **options
            )
        except Exception as error:  # a template, and what it writes, may raise any
            why = " ".join(str(error).split())[:200] or type(error).__name__
            raise ArgumentError(
                f"processor: the chat template can't write these messages ({why}). "
                "Fix: use roles, contents and template_kwargs that the template knows"
            ) from None
        return text

    def encoded(
        self, text: str, items: Sequence[Medium], before: Sequence[Medium] = ()
    ) -> np.ndarray:
        """int64 [L]: a rendered text, each placeholder as many times as its medium has vision tokens.

        `before`: the media in front of it, where pictures are numbered.
        """
        if any("\ud800" <= c <= "\udfff" for c in text):
            raise ArgumentError(
                "processor: the text holds a lone surrogate, which can't be encoded. "
                "Fix: clean it by text.encode('utf-8', 'replace').decode()"
            )
        p, numbers = self.parts, self._numbers_after(before)
        text = with_runs(text, items, p.family, p.tokenizer, p.video_markers, numbers)
        ids = p.tokenizer(text, add_special_tokens=False)["input_ids"]
        ids = np.asarray(ids, dtype=np.int64)
        return repeated(ids, items, p.family, p.tokens_per_second)

    def expanded(
        self, ids: np.ndarray, items: Sequence[Medium], before: Sequence[Medium] = ()
    ) -> tuple[np.ndarray, np.ndarray]:
        """See `expanded_ids`; `before` as in `encoded`."""
        p, numbers = self.parts, self._numbers_after(before)
        return expanded_ids(
            ids, items, p.family, p.tokenizer, p.video_markers, numbers, p.tokens_per_second
        )

    def _numbers_after(self, media: Sequence[Medium]) -> Counter[str] | None:
        """How many pictures and videos `media` (in order of appearance) are; None: their numbers are not written."""
        return counted(media) if self.parts.numbered else None

    def _pads(self) -> list[str]:
        """The text of each of the family's `prompt_ids`."""
        pads = self.parts.tokenizer.convert_ids_to_tokens(
            list(self.parts.family.prompt_ids.values())
        )
        return list(pads)

    def encoded_turns(
        self, text: str, turns: Sequence[tuple[int, int]], items: Sequence[Medium]
    ) -> tuple[np.ndarray, list[LossSpan]]:
        """Ids of `text`, each turn encoded by itself, as a policy is prompted; and the turns in them."""
        pads = self._pads()
        left, done = pictures(items), 0
        pieces: list[np.ndarray] = []
        spans: list[LossSpan] = []
        before: list[Medium] = []

        def add(piece: str, shown: Sequence[Sequence[Medium]]) -> tuple[int, int]:
            media = [view for views in shown for view in views]
            start = sum(map(len, pieces))
            pieces.append(self.encoded(piece, media, before))
            before.extend(media)
            return start, start + len(pieces[-1])

        for k, (start, stop) in enumerate(turns):
            context, turn = text[done:start], text[start:stop]
            if any(pad in turn for pad in pads):
                raise ArgumentError(
                    f"processor: the assistant's turn {k} holds a picture or its placeholder, but a policy "
                    "writes text only. "
                    "Fix: move the picture to a user or tool message"
                )
            count = sum(context.count(pad) for pad in pads)
            add(context, left[:count])
            left, done = left[count:], stop
            spans.append(LossSpan(*add(turn, ()), turn=k))
        add(text[done:], left)
        return np.concatenate(pieces), spans
