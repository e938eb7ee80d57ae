"""The command `kvp generate`: answer prompts from compacted caches, beside the full ones if that is asked for."""

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flows.commands.options import HomeOption, JsonOption
from flows.runtime.process import (
    configure_libraries,
    existing_home,
    open_home,
    prepare_process,
    standard_output_kept_clean,
)
from flows.runtime.standard_streams import remark
from storage.home import Home

if TYPE_CHECKING:
    from kvpolicy.inference.generation import Generation
    from kvpolicy.models.reference import ModelReference

_STANDARD_INPUT = "-"
_MOST_BYTES = 64 * 2**20  # of a prompt; no model has positions for so much, and to take it apart would take minutes


def generate(
    budget: Annotated[int, typer.Option(help="Entries of the prompt that each KV head keeps, in tokens")],
    prompt_file: Annotated[
        list[str], typer.Option(help="Text to answer, - for standard input; repeatable: all are answered together")
    ],
    model: Annotated[
        str, typer.Option(help="embedded, a folder, a GGUF file, a hub id or models:/NAME/1", metavar="REF")
    ] = "embedded",
    policy: Annotated[
        str, typer.Option(help="A folder, champion, an artifact's id or models:/NAME/1", metavar="REF")
    ] = "champion",
    max_new_tokens: Annotated[int, typer.Option(help="Tokens that an answer may have")] = 128,
    chunk_tokens: Annotated[int | None, typer.Option(help="Evict after so many tokens of a prompt, too")] = None,
    evict_every: Annotated[int | None, typer.Option(help="Evict after so many tokens of the answer, too")] = None,
    compare: Annotated[bool, typer.Option("--compare", help="Answer from the full cache as well")] = False,
    dtype: Annotated[str, typer.Option(help="In which the model runs: bfloat16, float16 or float32")] = "bfloat16",
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Answer prompts with a policy: from a cache that keeps what it ranks highest."""
    configure_libraries()
    prompts = [_read(place) for place in prompt_file]
    with standard_output_kept_clean():
        prepare_process()
        from kvpolicy.inference.generation import compressed_generate
        from kvpolicy.inference.loading import load_model
        from kvpolicy.text.chat_format import prompt_format
        from tasks.framework.progress import LOGGER
        from tasks.inputs.policies import find_policy, policy_folder

        opened = None if policy_folder(policy) else _home_of(policy, home)
        reference = _find_model(model, home)
        # Before the model's weights are loaded, which takes longer.
        policies = find_policy(opened, policy, model_digest=reference.digest)
        loaded = load_model(reference, dtype=dtype)
        if note := prompt_format(loaded.tokenizer).note:
            LOGGER.warning("generate: %s", note)
        LOGGER.info("generate: %d at once, %d entries kept in each head", len(prompts), budget)
        compressed = compressed_generate(
            loaded,
            policies,
            prompts,
            budget=budget,
            chunk_tokens=chunk_tokens,
            evict_every_tokens=evict_every,
            max_new_tokens=max_new_tokens,
        )
        full = None
        if compare:  # afterwards: whoever comes first also warms everything up
            LOGGER.info("generate: the same from the full cache")
            full = compressed_generate(loaded, policies, prompts, budget=None, max_new_tokens=max_new_tokens)
    answers = list(zip(prompt_file, compressed, full or [None] * len(prompts), strict=True))
    if as_json:
        document = {
            "model": {"name": reference.name, "digest": reference.digest},
            "policy": policy,
            "budget": budget,
            "format_note": compressed[0].format_note,
            "answers": [
                {"prompt_file": place, "compacted": _plain(compacted), "full": _plain(other) if other else None}
                for place, compacted, other in answers
            ],
        }
        print(json.dumps(document, allow_nan=False))
        return
    for place, compacted, other in answers:
        if other:
            _print_both(place, budget, compacted, other)
        else:
            _print_answer(place if len(prompts) > 1 else "", compacted)
        remark(_what_was_evicted(compacted, budget))


def _read(place: str) -> str:
    from kvpolicy.errors import InputError

    try:
        if place == _STANDARD_INPUT:
            content = sys.stdin.buffer.read(_MOST_BYTES + 1)  # bytes, as some locales let text pass that is none
        else:
            with Path(place).expanduser().open("rb") as stream:
                content = stream.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise InputError(f"prompt file {place} has more than {_MOST_BYTES:,} bytes: shorten it")
        text = content.decode("utf-8-sig").replace("\r\n", "\n")  # as Windows' editors write it
    except UnicodeDecodeError as error:
        raise InputError(
            f"prompt file {place} is no text in UTF-8 ({error.reason} at byte {error.start}): convert it first"
        ) from error
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"prompt file {place} cannot be read ({reason}): name a text file") from error
    if not text.strip():
        raise InputError(f"prompt file {place} is empty: there is nothing to answer")
    return text


def _find_model(source: str, home: str | None) -> "ModelReference":
    from kvpolicy.models.reference import resolve_model
    from kvpolicy.models.registered import is_registered

    if not is_registered(source):
        return resolve_model(source)
    from tasks.model import resolve

    return resolve(_home_of(source, home), source)


def _home_of(reference: str, home: str | None) -> Home:
    """Where a reference is looked up. A registry in a database of its own may be used from a home that is new."""
    from kvpolicy.models.registered import is_registered

    if is_registered(reference) and os.environ.get("KVP_MLFLOW_URI"):
        return open_home(home)
    return existing_home(home)


def _figures(answer: "Generation") -> dict[str, Any]:
    return {
        "prompt_tokens": answer.num_prompt_tokens,
        "kept_tokens": answer.num_kept_tokens,
        "evicted_tokens": answer.num_evicted_tokens,
        "cache_bytes": answer.cache_bytes,
        "new_tokens": len(answer.token_ids),
        "tokens_per_s": answer.tokens_per_s,
    }


def _plain(answer: "Generation") -> dict[str, Any]:
    return {"text": answer.text, **_figures(answer)}


def _what_was_evicted(answer: "Generation", budget: int) -> str:
    if not answer.num_evicted_tokens:
        return f"nothing was evicted: the prompt has {answer.num_prompt_tokens} tokens, the budget is {budget}"
    speed = "" if answer.tokens_per_s is None else f", {answer.tokens_per_s:.1f} tokens a second"
    return (
        f"{answer.num_evicted_tokens} of {answer.num_prompt_tokens} tokens were evicted; "
        f"{answer.cache_bytes:,} bytes of keys and values{speed}"
    )


def _print_answer(heading: str, answer: "Generation") -> None:
    if heading:
        print(f"== {heading}")
    print(answer.text)


def _print_both(place: str, budget: int, compressed: "Generation", full: "Generation") -> None:
    """A table: the full cache, the compacted one, and what was gained."""
    from rich.table import Table
    from rich.text import Text

    from flows.display.printing import console

    table = Table(title=Text(place), header_style="bold", box=None, padding=(0, 2))
    for name in ("", "full cache", f"budget {budget}", "gain"):
        table.add_column(Text(name), overflow="fold")
    table.add_row("answer", Text(full.text), Text(compressed.text), "")
    others = _figures(full)
    for name, figure in _figures(compressed).items():
        gain = ""
        if name == "cache_bytes":
            gain = f"{others[name] / figure:.2f} times less"
        elif name == "tokens_per_s" and figure and others[name]:
            gain = f"{figure / others[name]:.2f} times as fast"
        title = name.replace("_", " ").replace(" per s", " a second")
        table.add_row(title, _number(others[name]), _number(figure), gain)
    console().print(table)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.1f}" if isinstance(value, float) else f"{value:,}"
