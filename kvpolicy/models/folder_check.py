"""Refuse model folders before anything of them is loaded: for code, files outside their digest, damage.

Code of a model is never run. Where a folder names some (`auto_map`) and transformers implements the same architecture
and the tokenizer that the folder declares, transformers' own classes are used in the code's place; otherwise the folder
is refused. So the digest of a model leaves code out: it covers everything that is read of the folder
(`kvpolicy.models.model_folder.content_files`), and what the files refer to must be among these.

Every load passes `trust_remote_code=False` besides: transformers asks on standard input where the argument is absent.
Kernels that transformers itself chooses are libraries, like transformers; those that a configuration asks for are code.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from kvpolicy.errors import InputError
from kvpolicy.models.model_folder import is_content

_IMPLEMENTATIONS = ("attn_implementation", "experts_implementation")
_EXPERTS = {"eager", "batched_mm", "grouped_mm"}  # others of transformers' are kernels that it fetches from the hub
_REMEDY = "use a model that transformers implements"


def require_loadable_folder(folder: Path) -> None:
    """Refuse a folder that could not be loaded without running code of its own, or without files outside its digest.

    Raises:
        InputError: With what is wrong and what to do, and without the name of the model, which the caller knows.
    """
    _require_readable_files(folder)
    if (folder / "adapter_config.json").exists():
        raise InputError(
            "adapter_config.json makes it an adapter of another model: merge it into that model and save it"
        )
    config = _read_object(folder / "config.json")
    tokenizer = _read_object(folder / "tokenizer_config.json")
    if "configuration_files" in config:
        raise InputError(
            "config.json refers to other configurations (configuration_files): save it with transformers again"
        )
    _require_known_implementation(config)
    _require_known_quantization(config)
    models = ("AutoConfig", "AutoModelForCausalLM", "AutoModel")
    _require_known_class("config.json", config, "model_type", "architecture", _is_architecture, *models)
    _require_known_class(
        "tokenizer_config.json", tokenizer, "tokenizer_class", "tokenizer", _is_tokenizer, "AutoTokenizer"
    )
    for place, name in _references(folder, config, tokenizer):
        if not _is_beside(name):
            raise InputError(f"{place} refers to {name!r}, which is not a file of a model beside it: save it there")
    _require_token_ids(_read_object(folder / "generation_config.json").get("eos_token_id"))


def _require_readable_files(folder: Path) -> None:
    """Refuse links that lead nowhere, and pipes, on which reading would wait."""
    for path in sorted(folder.iterdir()):
        if is_content(path.name) and not (path.is_file() or path.is_dir()):
            raise InputError(f"{path.name} is not a file, or a link that leads to none: fetch it again")


def _require_token_ids(ends: Any) -> None:
    if not all(isinstance(end, int) for end in (ends if isinstance(ends, list) else [ends or 0])):
        raise InputError(
            f"generation_config.json has eos_token_id {ends!r}: expected the id of a token, or a list of these"
        )


def _require_known_implementation(config: Mapping[str, Any]) -> None:
    """Refuse a configuration that asks for a kernel of the hub."""
    for key in _IMPLEMENTATIONS:
        value = config.get(key, config.get(f"_{key}"))
        for name in value.values() if isinstance(value, dict) else [value]:
            is_kernel = isinstance(name, str) and (
                "/" in name or (key == "experts_implementation" and name not in _EXPERTS)
            )
            if is_kernel:
                raise InputError(f"config.json asks for the kernel {name!r} ({key}), which is code: delete that entry")


def _require_known_quantization(config: Mapping[str, Any]) -> None:
    """Refuse weights that transformers would take for plain ones, with no more than a warning."""
    quantization = config.get("quantization_config")
    if not isinstance(quantization, dict) or "quant_method" not in quantization:
        return  # refused in loading, if there is one
    from transformers.quantizers import AutoHfQuantizer

    if not AutoHfQuantizer.supports_quant_method(quantization):
        raise InputError(
            f"config.json names weights that are quantized by {quantization['quant_method']!r}, which transformers "
            "does not know: use the model that they were made of"
        )


def _require_known_class(
    file: str, config: Mapping[str, Any], key: str, noun: str, is_known: Callable[[str], bool], *classes: str
) -> None:
    """Refuse a configuration that names code for some of transformers' classes unless transformers has its own.

    Another tokenizer than the named one would make other tokens of the same text.
    """
    code, name = _code_of(config, *classes), config.get(key)
    if not code or (isinstance(name, str) and is_known(name)):
        return
    import transformers

    raise InputError(
        f"{file} names code of its own ({code}), which is never run, and transformers "
        f"{transformers.__version__} has no {noun} {name!r}: {_REMEDY}"
    )


def _is_architecture(name: str) -> bool:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return name in CONFIG_MAPPING


def _is_tokenizer(name: str) -> bool:
    from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

    return tokenizer_class_from_name(name) is not None


def _code_of(config: Mapping[str, Any], *classes: str) -> str:
    """The first of some of transformers' classes for which a configuration names code, as it names it; or empty."""
    auto_map = config.get("auto_map")
    if isinstance(auto_map, list):  # of tokenizers, as it was once written
        auto_map = {"AutoTokenizer": auto_map}
    if not isinstance(auto_map, dict):
        return ""
    code = next((auto_map[name] for name in classes if auto_map.get(name)), "")
    return ", ".join(str(part) for part in code if part) if isinstance(code, list) else str(code)


def _references(folder: Path, config: Mapping[str, Any], tokenizer: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Other files that the files of a folder name, each with the file that does."""
    if config.get("transformers_weights") is not None:
        yield "config.json", config["transformers_weights"]
    files = tokenizer.get("fast_tokenizer_files") or []
    for name in files if isinstance(files, list) else [files]:
        yield "tokenizer_config.json", name
    for index in sorted(folder.glob("*.index.json")):
        weights = _read_object(index).get("weight_map")
        for name in sorted(set(map(str, weights.values()))) if isinstance(weights, dict) else ():
            yield index.name, name


def _is_beside(name: Any) -> bool:
    return isinstance(name, str) and "\\" not in name and PurePosixPath(name).name == name and is_content(name)


def _read_object(path: Path) -> dict[str, Any]:
    """A JSON object, or an empty one where there is no such file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise InputError(f"{path.name} cannot be read ({error.strerror}): fetch it again") from error
    except (ValueError, RecursionError):  # of damage, or brackets without end
        content = None
    if not isinstance(content, dict):
        raise InputError(f"{path.name} is not a JSON object: fetch it again")
    return content
