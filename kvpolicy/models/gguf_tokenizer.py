"""The tokenizer of a GGUF file: transformers' reading of the header, with what that leaves out of it put back.

transformers (5.24) leaves out how text is split before merges where it knows no such name, that tokens of the
vocabulary are taken whole before merges, the beginning token that llama.cpp adds where the header is silent, and that
no blank goes before a text. A header that asks for anything else than what is known here is refused.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

from kvpolicy.errors import InputError
from kvpolicy.models.gguf_file import GgufFile

# Names of `tokenizer.ggml.pre`, as llama.cpp reads them, beside those that transformers splits text by.
_LIKE_GPT2 = {"gpt-2", "phi-2", "olmo", "jais"}
_DIGITS_ALONE = {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"}  # then like GPT-2
_WHOLE_TOKENS = {"llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "tekken"}
_CONTROL, _USER_DEFINED = 3, 4
_ROLES = ("bos", "eos", "eot", "eom", "unknown", "padding")
_KNOWN: dict[str, type] = {
    **dict.fromkeys(("ggml.model", "ggml.pre", "chat_template", "huggingface.json"), str),
    **dict.fromkeys(("ggml.tokens", "ggml.token_type", "ggml.scores", "ggml.merges", "chat_templates"), list),
    **dict.fromkeys(("ggml.add_bos_token", "ggml.add_eos_token", "ggml.add_space_prefix"), bool),
    "ggml.token_type_count": int,
}
_ITEMS: dict[str, tuple[type, str]] = {
    "tokens": (str, "texts"),
    "merges": (str, "texts"),
    "token_type": (int, "whole numbers"),
    "scores": (float, "numbers"),
}
_TYPE_NAMES = {str: "a text", bool: "true or false", int: "a whole number"}


def read_tokenizer(file: GgufFile) -> Any:
    """Make the tokenizer that a header describes.

    Raises:
        InputError: If the header asks for what is not known here, or a token of the result has another id than in it.
    """
    _require_known_fields(file)
    # In a folder of its own, as transformers would also read what else is in the file's: a tokenizer's configuration.
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "model.gguf").symlink_to(file.path.resolve())
        tokenizer = _read(Path(scratch), add_bos_token=_adds_beginning(file))
    if file.fields["tokenizer.ggml.model"] == "gpt2":
        _split_as_named(tokenizer, file.fields["tokenizer.ggml.pre"])
    else:
        _set_blank_before_text(tokenizer, file)
    _drop_tokens_beyond(tokenizer, len(file.fields["tokenizer.ggml.tokens"]))
    _require_same_tokens(tokenizer, file)
    return tokenizer


def _read(folder: Path, **settings: Any) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(
        folder, gguf_file="model.gguf", local_files_only=True, trust_remote_code=False, **settings
    )


def _require_known_fields(file: GgufFile) -> None:
    """Refuse a header that asks for anything of a tokenizer that would be dropped, or holds what no tokenizer has."""
    for name, value in file.fields.items():
        prefix, _, key = name.partition(".")
        kind = int if key.endswith("_token_id") else str if key.startswith("chat_template.") else _KNOWN.get(key)
        if prefix == "tokenizer" and kind is None and value not in (False, 0, [], ""):
            raise InputError(
                f"its header has {name}, which would be dropped: pass the folder of the model it was made from"
            )
        if prefix == "tokenizer" and kind is not None:
            _require_type(name, value, kind)
    model, pre = (file.fields.get(f"tokenizer.ggml.{name}") for name in ("model", "pre"))
    if model not in ("gpt2", "llama"):
        raise InputError(f"its tokenizer is of kind {model!r}: expected 'gpt2' or 'llama'")
    if model == "gpt2" and pre not in _known_splits():
        raise InputError(
            f"its header splits text by {pre!r} (tokenizer.ggml.pre), which is not known here: pass the folder of the "
            "model it was made from"
        )
    needed = ["tokens", "merges"] if model == "gpt2" else ["tokens", "scores"]
    if missing := [name for name in needed if not file.fields.get(f"tokenizer.ggml.{name}")]:
        raise InputError(f"its header has no tokenizer.ggml.{missing[0]}: copy or make it again")
    num_tokens = len(file.fields["tokenizer.ggml.tokens"])
    for name in ("token_type", "scores"):
        count = len(file.fields.get(f"tokenizer.ggml.{name}") or ())
        if count not in (0, num_tokens):
            raise InputError(f"its header has {count} tokenizer.ggml.{name} of {num_tokens} tokens: make it again")
    for name, index in _named_ids(file).items():
        if not 0 <= index < num_tokens:
            raise InputError(f"its header has {name} = {index} of {num_tokens} tokens: copy or make it again")


def _require_type(name: str, value: Any, kind: type[Any]) -> None:
    items, item_names = _ITEMS.get(name.rpartition(".")[2], (object, "values"))
    if type(value) is not kind or (kind is list and not all(isinstance(item, items) for item in value)):
        expected = f"a list of {item_names}" if kind is list else _TYPE_NAMES[kind]
        raise InputError(f"its header has a {name} that is not {expected}: copy or make it again")


def _named_ids(file: GgufFile) -> dict[str, int]:
    """Ids of the special tokens that texts are made with, by their fields."""
    names = [f"tokenizer.ggml.{role}_token_id" for role in _ROLES]
    return {name: file.fields[name] for name in names if name in file.fields}


def _known_splits() -> set[str]:
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    return _LIKE_GPT2 | _DIGITS_ALONE | set(GGUF_PRE_TOKENIZER_SPLITS)


def _adds_beginning(file: GgufFile) -> bool:
    """Whether a text begins with the beginning token, if the header is silent."""
    if "tokenizer.ggml.bos_token_id" not in file.fields:
        return False
    default = file.fields["tokenizer.ggml.model"] == "llama" or file.fields.get("tokenizer.ggml.pre") in _WHOLE_TOKENS
    return bool(file.fields.get("tokenizer.ggml.add_bos_token", default))


def _split_as_named(tokenizer: Any, pre: str) -> None:
    from tokenizers import pre_tokenizers

    backend = tokenizer.backend_tokenizer
    if pre in _DIGITS_ALONE:
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    if pre in _WHOLE_TOKENS:
        model = backend.model
        model.ignore_merges = True
        backend.model = model


def _drop_tokens_beyond(tokenizer: Any, num_tokens: int) -> None:
    """Drop what transformers' classes add of their own after the header's tokens, such as GPT-2's end of text."""
    from tokenizers import Tokenizer

    content = json.loads(tokenizer.backend_tokenizer.to_str())
    kept = [token for token in content["added_tokens"] if token["id"] < num_tokens]
    if len(kept) < len(content["added_tokens"]):
        content["added_tokens"] = kept
        tokenizer._tokenizer = Tokenizer.from_str(json.dumps(content))  # tokenizers has no way to remove one


def _set_blank_before_text(tokenizer: Any, file: GgufFile) -> None:
    """Leave out the blank that a text otherwise begins with, where the header says so."""
    from tokenizers import decoders, normalizers

    has_blank = bool(file.fields.get("tokenizer.ggml.add_space_prefix", True))
    if file.architecture.startswith("gemma"):  # its tokenizer never has one
        if has_blank:
            raise InputError("its header begins texts with a blank, which the tokenizers of Gemma do not")
    elif not has_blank:
        backend = tokenizer.backend_tokenizer
        backend.normalizer = normalizers.Replace(" ", "▁")
        backend.pre_tokenizer = None
        backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])


def _require_same_tokens(tokenizer: Any, file: GgufFile) -> None:
    """Refuse a tokenizer that cuts a special token, or has other ids than the header."""
    tokens = file.fields["tokenizer.ggml.tokens"]
    kinds = file.fields.get("tokenizer.ggml.token_type") or []
    template = str(file.fields.get("tokenizer.chat_template", ""))
    marked = {index for index, kind in enumerate(kinds) if kind in (_CONTROL, _USER_DEFINED)}
    for index in sorted({index for index in marked if tokens[index] in template} | set(_named_ids(file).values())):
        text = tokens[index]
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        if tokenizer.convert_tokens_to_ids(text) != index or ids != [index]:
            raise InputError(
                f"its token {index} ({text!r}) would be read as others: pass the folder of the model it was made from"
            )
    if len(tokenizer) > file.shape("token_embd.weight")[0]:
        raise InputError(f"its tokenizer has {len(tokenizer)} tokens, more than embeddings: copy or make it again")
