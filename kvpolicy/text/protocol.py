"""The two settings in which a cache is compressed, and how they divide a sequence.

Query-agnostic: compress after the context, then run the question. Query-aware: compress after context and question. A
dialogue has no question, so that both divide it alike.
"""

from dataclasses import dataclass
from typing import Annotated

from kvpolicy.config.settings import one_of
from kvpolicy.errors import InputError
from kvpolicy.names import SETTINGS
from kvpolicy.text.encoded_sample import EncodedSample

Setting = Annotated[str, one_of(SETTINGS)]


@dataclass(frozen=True, kw_only=True)
class Cut:
    """Where a setting divides the sequence into ranked context, question yet to come, and answer.

    Attributes:
        setting: Name of the setting.
        num_context: Tokens whose entries are ranked.
        num_question: Tokens of the question that come after compression; 0 where it belongs to the context.
        num_answer: Tokens of the reference answer.
    """

    setting: str
    num_context: int
    num_question: int
    num_answer: int

    @property
    def num_future(self) -> int:
        """Tokens after the context: those whose attention makes its entries important."""
        return self.num_question + self.num_answer


def cut_sample(example: EncodedSample, setting: str) -> Cut:
    """Divide an encoded sample as a setting does.

    Raises:
        InputError: If the setting is unknown, or an answer has no token to be evaluated on after the first.
    """
    check_setting(setting)
    num_context, num_question, num_answer = map(len, (example.context_ids, example.question_ids, example.answer_ids))
    if num_answer < 2:
        raise InputError(
            f"sample {example.sample.sample_id}: the reference answer has {num_answer} token, expected at least 2 "
            "(the last one predicts nothing)"
        )
    if setting == "query_aware":
        num_context, num_question = num_context + num_question, 0
    return Cut(setting=setting, num_context=num_context, num_question=num_question, num_answer=num_answer)


def check_setting(setting: str) -> None:
    """Check the name of a setting.

    Raises:
        InputError: If there is none of that name.
    """
    if setting not in SETTINGS:
        raise InputError(f"setting {setting!r} is unknown, expected one of {', '.join(SETTINGS)}")
