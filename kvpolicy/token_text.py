"""The text of single tokens, so that people can read a context token by token."""

from collections.abc import Sequence
from typing import Any

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"


def token_pieces(token_ids: Sequence[int], tokenizer: Any) -> list[str]:
    """Split the text of some tokens into the part that each of them adds.

    A token alone may not be text: it may be some bytes of a letter, or lose the blank before it. So each is decoded
    behind those before it, and what is new is its own. Of a letter made of several tokens the last has it, and the
    others have nothing.

    Args:
        token_ids: The tokens.
        tokenizer: A tokenizer of transformers.

    Returns:
        One text a token; together they are what the tokenizer makes of all of them.
    """
    pieces: list[str] = []
    before, whole = 0, 0  # where the last text that was whole begins and ends
    for end in range(1, len(token_ids) + 1):
        text = _text(token_ids[before:end], tokenizer)
        if text.endswith(_UNFINISHED) and end < len(token_ids):
            pieces.append("")
            continue
        pieces.append(text[len(_text(token_ids[before:whole], tokenizer)) :])
        before, whole = whole, end
    return pieces


def _text(token_ids: Sequence[int], tokenizer: Any) -> str:
    text: str = tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text
