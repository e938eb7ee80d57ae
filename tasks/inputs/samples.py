"""Reading prompt sets again: as samples, as token ids, and as rows of the catalog."""

from pathlib import Path
from typing import Any

from kvpolicy.digests import digest_json
from kvpolicy.errors import InputError
from kvpolicy.text.chat_format import rendered_formats
from kvpolicy.text.encoded_sample import EncodedSample, encode
from kvpolicy.text.protocol import cut_sample
from kvpolicy.text.sample import Sample
from storage.tables.parquet import read_rows
from tasks.framework.references import ModelRef, PromptsRef
from tasks.inputs.loaded_model import load_model


def read_samples(prompts: PromptsRef) -> list[Sample]:
    """Read the samples of a set, in its order."""
    return [_sample(row) for row in read_rows(Path(prompts.path))]


def read_encoded(prompts: PromptsRef, model: ModelRef, part: slice = slice(None)) -> list[EncodedSample]:
    """Read samples of a set, all or a part, as token ids of a model.

    Raises:
        InputError: If the model's chat template does not render what it rendered when the set was written.
    """
    tokenizer = load_model(model).tokenizer
    if prompts.formats_digest not in ("", digest_json(rendered_formats(tokenizer))):
        raise InputError(
            f"prompts {prompts.artifact_id} were written in another format than the chat template of model "
            f"{model.name} renders here: run the pipeline again, or use the versions of transformers and jinja2 that "
            "wrote them"
        )
    return [encode(sample, tokenizer) for sample in read_samples(prompts)[part]]


def sample_row(
    example: EncodedSample, setting: str, prompts: PromptsRef, model: ModelRef, collection: str = ""
) -> dict[str, Any]:
    """Row of the catalog's table `samples`; the collection is that of its traces, if they are kept."""
    sample = example.sample
    cut = cut_sample(example, setting)
    return {
        "sample_id": sample.sample_id,
        "benchmark": sample.benchmark,
        "task": sample.task,
        "split": sample.split,
        "setting": setting,
        "seed": prompts.seed,
        "prompt_digest": sample.digest(),
        "context_tokens": cut.num_context,
        "question_tokens": len(example.question_ids),
        "answer_tokens": cut.num_answer,
        "collection": collection,
        "model_digest": model.digest,
    }


def _sample(row: dict[str, Any]) -> Sample:
    fields: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in row.items()}
    return Sample(**fields)
