"""The text of single tokens, so that people can read a context token by token."""

from collections.abc import Sequence
from typing import Any

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"
# The same character where a text holds it: as SentencePiece, byte-level tokens and tokens of single bytes are named.
_SPELLED = (_UNFINISHED, "ï¿½", "<0xEF><0xBF><0xBD>")


def token_pieces(token_ids: Sequence[int], tokenizer: Any) -> list[str]:
    """Split the text of some tokens into the part that each of them adds.

    A token alone may not be text: it may be some bytes of a letter, or lose the blank before it. So each is decoded
    behind those before it, and what is new is its own. Of a letter made of several tokens the last has it, and the
    others have nothing.

    Args:
        token_ids: The tokens.
        tokenizer: A tokenizer of transformers.

    Returns:
        One text a token; together they are what the tokenizer makes of all of them, white space at the ends included.
    """
    # Slow tokenizers strip what they decode, so to those the tokens are given between letters, whose text is cut off.
    letters = [] if tokenizer.is_fast else tokenizer("a", add_special_tokens=False)["input_ids"]
    first = _decoded(letters, tokenizer)
    last = _decoded([*letters, *letters], tokenizer).removeprefix(first)

    def text_of(ids: Sequence[int]) -> str:
        return _decoded([*letters, *ids, *letters], tokenizer).removeprefix(first).removesuffix(last)

    pieces: list[str] = []
    before, whole = 0, 0  # where the last text that was whole begins and ends
    for end in range(1, len(token_ids) + 1):
        text = text_of(token_ids[before:end])
        if (
            text.endswith(_UNFINISHED)
            and end < len(token_ids)
            and not _is_replacement(token_ids[before:end][-3:], tokenizer)
        ):
            pieces.append("")
            continue
        pieces.append(text[len(text_of(token_ids[before:whole])) :])
        before, whole = whole, end
    return pieces


def _is_replacement(token_ids: Sequence[int], tokenizer: Any) -> bool:
    """Whether tokens end with a replacement character of the text, rather than some bytes of a letter."""
    return "".join(tokenizer.convert_ids_to_tokens(list(token_ids))).endswith(_SPELLED)


def _decoded(token_ids: Sequence[int], tokenizer: Any) -> str:
    text: str = tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text
