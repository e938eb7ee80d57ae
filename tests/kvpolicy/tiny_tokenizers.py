"""Tokenizers of every kind that causal language models have, trained on a few sentences."""

import functools
import io
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import sentencepiece
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from transformers.tokenization_utils_sentencepiece import SentencePieceBackend

SPECIAL = ["<unk>", "<s>", "</s>", "<|turn|>", "<|end|>"]
PLAIN_ADDED = "<|call|>"  # an added token that is not special
_SENTENCES = [
    "the lamp is red and the answer is red, yes or no",
    "yes, the lamps are red; a lamp that is not red is not the answer",
    "the end of the turn is the end of the call: user, assistant, end, turn, call",
    "no  two blanks\nand 1234 new lines\n\nfollow the answers",
]


def _wrapped(backend: Tokenizer, **options: Any) -> PreTrainedTokenizerFast:
    backend.add_special_tokens(SPECIAL)
    backend.add_tokens([AddedToken(PLAIN_ADDED, normalized=False)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>", **options
    )


def _byte_level(*, add_prefix_space: bool) -> Any:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(_SENTENCES * 5, trainer)
    return _wrapped(backend)


def _split_like_llama_3() -> Any:
    backend = Tokenizer(models.BPE())
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
        r"\s+(?!\S)|\s+"
    )
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(_SENTENCES * 5, trainer)
    return _wrapped(backend)


@functools.cache
def _sentencepiece(model_type: str) -> bytes:
    """A SentencePiece model that loses nothing of a text: bytes for what it does not know, and no normalization."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(_SENTENCES * 20),
        model_writer=model,
        model_type=model_type,
        vocab_size=330,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return model.getvalue()


def _proto(model_type: str) -> Any:
    from transformers.convert_slow_tokenizer import import_protobuf

    return import_protobuf().ModelProto.FromString(_sentencepiece(model_type))


def _slow(model_type: str, *, legacy: bool) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokenizer.model"
        path.write_bytes(_sentencepiece(model_type))
        made = SentencePieceBackend(
            vocab_file=str(path),
            legacy=legacy,
            unk_token="<unk>",
            bos_token="<s>",
            eos_token="</s>",
            additional_special_tokens=["<|turn|>", "<|end|>"],
        )
    made.add_tokens([AddedToken(PLAIN_ADDED, normalized=False)])
    return made


def _fast(model_type: str, *, normalizer: Any = None, pre_tokenizer: Any = None) -> Any:
    """What conversions of SentencePiece models come to: the same vocabulary, with the prefix written in many ways."""
    pieces = [(piece.piece, piece.score) for piece in _proto(model_type).pieces]
    if model_type == "unigram":
        model = models.Unigram(pieces, unk_id=0, byte_fallback=True)
    else:
        vocabulary = {text: number for number, (text, _) in enumerate(pieces)}
        merges = sorted(
            (
                (-score, text[:cut], text[cut:])
                for text, score in pieces
                for cut in range(1, len(text))
                if not re.fullmatch(r"<.*>", text) and text[:cut] in vocabulary and text[cut:] in vocabulary
            ),
        )
        model = models.BPE(
            vocab=vocabulary,
            merges=[(first, second) for _, first, second in merges],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    backend = Tokenizer(model)
    if normalizer is not None:
        backend.normalizer = normalizer
    if pre_tokenizer is not None:
        backend.pre_tokenizer = pre_tokenizer
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(content=" ", left=1)]
    )
    return _wrapped(backend)


def _prepending() -> Any:
    return normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])


def _metaspace(scheme: str, *, split: bool = False) -> Any:
    return pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme, split=split)


KINDS: dict[str, Callable[[], Any]] = {
    "byte level": lambda: _byte_level(add_prefix_space=False),
    "byte level with a prefix": lambda: _byte_level(add_prefix_space=True),
    "byte level split as by Llama 3": _split_like_llama_3,
    "bpe, prepending normalizer": lambda: _fast("bpe", normalizer=_prepending()),
    "bpe, metaspace first": lambda: _fast("bpe", pre_tokenizer=_metaspace("first")),
    "bpe, metaspace always": lambda: _fast("bpe", pre_tokenizer=_metaspace("always", split=True)),
    "unigram, prepending normalizer": lambda: _fast("unigram", normalizer=_prepending()),
    "unigram, metaspace first": lambda: _fast("unigram", pre_tokenizer=_metaspace("first")),
    "unigram, metaspace always": lambda: _fast("unigram", pre_tokenizer=_metaspace("always", split=True)),
    "slow bpe, legacy": lambda: _slow("bpe", legacy=True),
    "slow bpe": lambda: _slow("bpe", legacy=False),
    "slow unigram, legacy": lambda: _slow("unigram", legacy=True),
}


@functools.cache
def tiny_tokenizer(kind: str) -> Any:
    """The tokenizer of a kind, made once; it is shared, so tests set nothing of it."""
    return KINDS[kind]()


def decoded(tokenizer: Any, ids: list[int]) -> str:
    """The exact text of tokens; the blank that a tokenizer wrote before it is not part of it."""
    if not isinstance(tokenizer, SentencePieceBackend):
        return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
    # transformers strips what slow tokenizers decode, and keeps the names of bytes.
    content = b""
    for name in tokenizer.convert_ids_to_tokens(ids):
        byte = re.fullmatch(r"<0x([0-9A-F]{2})>", name)
        content += bytes([int(byte[1], 16)]) if byte else name.replace("▁", " ").encode()
    text = content.decode()
    return text[1:] if tokenizer.legacy else text
