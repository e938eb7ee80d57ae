"""Texts and what a chat format writes between them, as token ids.

A sequence is made of parts that are tokenised apart, so that a token begins where a part does. Two rules make the
parts what they would be in the whole text:

- A part that follows text begins as it does there. Some tokenizers write a blank before every text that they are given
  (SentencePiece's dummy prefix, in one form or another), or drop one; to those a part is given behind a character,
  whose tokens are cut off. So a part has the tokens of the whole text wherever this has a token boundary at the
  part's beginning.
- Texts of users and files are text. A control token that is spelled out in one (`<|im_end|>`) is tokenised as plain
  text: a token boundary is set inside it, where plain text has its first one. Only what the chat format writes becomes
  control tokens. Without such a text the tokens are those of the whole part.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from kvpolicy.errors import InputError
from kvpolicy.text.chat_format import added_tokens

# One of them does not merge with what follows it. First those behind which a word begins (WordPiece continues words in
# tokens of their own); last the new line, which some normalizers take for a blank, and drop beside another one.
_LEADS = ("\N{CJK UNIFIED IDEOGRAPH-4E00}", ".", ",", ")", "a", "Z", "0", "\n")

_BEGINNINGS = ("a", " a")  # of texts: a blank may be written before the one, or dropped from the other


@dataclass(frozen=True)
class Piece:
    """A piece of a part.

    Attributes:
        text: The piece.
        is_format: Whether the chat format writes it; otherwise it is a text of users or files.
    """

    text: str
    is_format: bool = False


@dataclass(frozen=True)
class _Tokens:
    """Tokens of a text, and where control tokens are spelled out in it: first character, and one after the last."""

    ids: list[int]
    controls: list[tuple[int, int]]


class TextEncoder:
    """Tokenises parts with one tokenizer.

    Control tokens are the special tokens, and those added tokens that the chat template writes. Tokens of one
    character and of white space are none: their text has no other tokens.
    """

    def __init__(self, tokenizer: Any, template_text: str) -> None:
        """Read a tokenizer's control tokens and find out whether it treats the beginning of a text in another way.

        Args:
            tokenizer: A tokenizer of transformers.
            template_text: All that its chat template may write (`kvpolicy.text.chat_format.template_text`).
        """
        self._tokenizer = tokenizer
        special = zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True)
        written = {
            number: token.content
            for number, token in added_tokens(tokenizer).items()
            if token.special or token.content in template_text
        }
        # These also stand for characters that have no token: they are control tokens only where they are spelled out.
        bytes_spelled = _byte_tokens(tokenizer)
        self._stand_ins = {tokenizer.unk_token_id, *bytes_spelled}
        named = {number: text for number, text in special if number is not None}  # the vocabulary may lack some
        controls = {**named, **written, **bytes_spelled}
        self._controls = {number: text for number, text in controls.items() if len(text.strip()) > 1}
        longest_first = sorted(self._controls.values(), key=len, reverse=True)
        self._spelled = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._boundaries: dict[str, int] = {}
        leads = {lead: self._tokens([lead])[0].ids for lead in _LEADS}
        self._leads = {lead: ids for lead, ids in leads.items() if ids and tokenizer.unk_token_id not in ids}
        self._beginnings_differ = True
        self._beginnings_differ = self._following(_BEGINNINGS) != self._tokens(_BEGINNINGS)

    def encode(self, pieces: Sequence[Piece], *, follows: bool) -> list[int]:
        """Tokenise a part.

        Args:
            pieces: Its pieces in order.
            follows: Whether the part follows text; otherwise it begins a sequence.

        Raises:
            InputError: A control token in a text cannot be tokenised as plain text.
        """
        text = "".join(piece.text for piece in pieces)
        of_users, start = [], 0
        for piece in pieces:
            if not piece.is_format and piece.text:
                of_users.append((start, start + len(piece.text)))
            start += len(piece.text)
        breaks: set[int] = set()
        while text:
            bounds = [0, *sorted(breaks), len(text)]
            stretches = [text[start:stop] for start, stop in pairwise(bounds)]
            encoded = [] if follows else self._tokens(stretches[:1])
            encoded += self._following(stretches[len(encoded) :])
            spans = {
                start + first + self._first_boundary(text[start + first : start + stop])
                for start, one in zip(bounds, encoded, strict=False)
                for first, stop in one.controls
                if any(start + first < end and begin < start + stop for begin, end in of_users)
            }
            if not spans:
                return [token for one in encoded for token in one.ids]
            breaks |= spans
        return []

    def _first_boundary(self, spelled: str) -> int:
        """Characters of a control token before the first token boundary that its text has as plain text."""
        if spelled not in self._boundaries:
            if len(spelled) < 2:
                raise InputError(
                    f"the text {spelled!r} is a control token to the model's tokenizer, which has no other tokens for "
                    "it: take it out"
                )
            ids = self._tokenizer(spelled, add_special_tokens=False, split_special_tokens=True)["input_ids"]
            firsts = (
                self._tokenizer.decode(ids[:count], skip_special_tokens=False, clean_up_tokenization_spaces=False)
                for count in range(1, len(ids))
            )
            proper = (len(first) for first in firsts if first and first != spelled and spelled.startswith(first))
            self._boundaries[spelled] = next(proper, 1)
        return self._boundaries[spelled]

    def _following(self, texts: Sequence[str]) -> list[_Tokens]:
        """Tokens of texts, each of which follows text."""
        if not self._beginnings_differ:
            return self._tokens(texts)
        done: dict[int, _Tokens] = {}
        for lead, lead_ids in self._leads.items():
            left = [place for place in range(len(texts)) if place not in done]
            for place, behind in zip(left, self._tokens([lead + texts[place] for place in left]), strict=True):
                if behind.ids[: len(lead_ids)] == lead_ids:
                    controls = [(start - len(lead), stop - len(lead)) for start, stop in behind.controls]
                    done[place] = _Tokens(behind.ids[len(lead_ids) :], controls)
        return [done[place] if place in done else self._tokens([text])[0] for place, text in enumerate(texts)]

    def _tokens(self, texts: Sequence[str]) -> list[_Tokens]:
        if not texts:
            return []
        # Not `verbose`: contexts are compacted, so a text longer than the model's maximum is no reason to warn here.
        batch = self._tokenizer(list(texts), add_special_tokens=False, verbose=False)
        encodings = batch.encodings or [None] * len(texts)
        return [
            _Tokens(ids, self._controls_in(text, ids, encoding))
            for text, ids, encoding in zip(texts, batch["input_ids"], encodings, strict=True)
        ]

    def _controls_in(self, text: str, ids: list[int], encoding: Any) -> list[tuple[int, int]]:
        places = [place for place, token in enumerate(ids) if token in self._controls]
        if not places or encoding is None:  # slow tokenizers look for control tokens in the text itself, as we do
            return [match.span() for match in self._spelled.finditer(text)] if places else []
        spans = []
        for place in places:
            start, stop = encoding.token_to_chars(place)
            spelled = self._controls[ids[place]]
            first = text.find(spelled, start, stop)  # the token may have taken white space beside it as well
            if first >= 0:
                spans.append((first, first + len(spelled)))
            elif ids[place] not in self._stand_ins:  # spelled otherwise: a normalizer made it what it is
                spans.append((start, stop))
        return spans


def _byte_tokens(tokenizer: Any) -> dict[int, str]:
    """SentencePiece's tokens of single bytes, with their names, which are text when they are spelled out."""
    names = [f"<0x{byte:02X}>" for byte in range(256)]
    numbers = tokenizer.convert_tokens_to_ids(names)
    return {
        number: name
        for number, name in zip(numbers, names, strict=True)
        if number is not None and tokenizer.convert_ids_to_tokens(number) == name
    }
