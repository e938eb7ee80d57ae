"""OASST2 dialogues: conversations joined end to end to a length, the later turns being the future.

The setting of arXiv 2602.10238 (OASST2-4k), which leaves open how conversations are joined and cut. Here:

- a sample is one long chat in the model's own format, each conversation following the last; none comes twice;
- conversations follow in an order that the seed draws; one that fits the length is taken whole, of one that does not
  as many exchanges as fit, if these fill the sample to three quarters at least; otherwise it waits for the next;
- all conversations of a sample are in one language;
- the future begins at the turn that leaves it nearest to a quarter of the tokens. Where that would be less than an
  eighth or more than a half, last exchanges are taken off, and if that is no help the sample is left out;
- a tree belongs to the split that owns its id, and trees that share a longer text over splits are left out;
- to train on, conversations are joined again in another order, round after round, until there are samples enough: each
  time others are the future, of another past. What is evaluated comes once.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from random import Random

from kvpolicy.benchmarks.oasst2.trees import Conversation, long_texts, read_conversations
from kvpolicy.benchmarks.sample_request import SampleRequest
from kvpolicy.benchmarks.splits import share_out
from kvpolicy.benchmarks.task import TaskInfo
from kvpolicy.text.encoded_sample import count_all_tokens, count_turn_tokens
from kvpolicy.text.sample import Sample

BENCHMARK = "oasst2"
VERSION = "2"
TASKS = (
    TaskInfo(
        benchmark=BENCHMARK,
        version=VERSION,
        task="dialogue",
        source="oasst2",
        metrics=("perplexity",),
        max_new_tokens=0,
        description="Conversations joined to the length; the last quarter of the turns is predicted.",
    ),
)

FUTURE_SHARE = 0.25
FUTURE_SHARES = (0.125, 0.5)
FILLED_SHARE = 0.75


@dataclass(kw_only=True)
class _Chat:
    """A sample while it fills."""

    length_tokens: int
    turns: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    num_conversations: int = 0
    is_cut: bool = False

    @property
    def is_filled(self) -> bool:
        return sum(self.tokens) >= FILLED_SHARE * self.length_tokens

    def take(self, turns: tuple[str, ...], tokens: tuple[int, ...]) -> bool:
        """Take a conversation, or the exchanges of it that fill the sample; whether any were taken."""
        room = self.length_tokens - sum(self.tokens)
        fitting = max(count for count in range(0, len(turns) + 1, 2) if sum(tokens[:count]) <= room)
        used = sum(self.tokens) + sum(tokens[:fitting])
        if fitting < len(turns) and used < FILLED_SHARE * self.length_tokens:
            return False
        self.turns += turns[:fitting]
        self.tokens += tokens[:fitting]
        self.num_conversations += fitting > 0
        self.is_cut = fitting < len(turns)
        return fitting > 0


def dialogues(request: SampleRequest) -> Iterator[Sample]:
    """The dialogues of a split until the conversations run out, or, to train on, until no order makes a new one.

    Raises:
        InputError: A row of a file is broken.
    """
    shared, num_shared = share_out(
        read_conversations(request),
        owner=lambda conversation: conversation.tree,
        parts=lambda conversation: long_texts(conversation.turns),
    )
    request.report("conversation with a text that another split has", num_shared)
    written: set[tuple[str, ...]] = set()
    for number in count() if request.split == "train" else range(1):
        # What is left out is counted in the first round alone.
        reporting = request if number == 0 else replace(request, reported=Counter())
        before = len(written)
        for chat in _chats(reporting, shared[request.split], reporting.rng("order", number)):
            sample = _sample(reporting, chat, len(written))
            if sample is None:
                reporting.report("dialogue without a turn at which to cut off a quarter")
            elif (turns := sample.context_turns + sample.answer_turns) not in written:
                written.add(turns)
                yield sample
        if len(written) == before:
            return


def fingerprint(sample: Sample) -> Mapping[str, frozenset[str]]:
    """List the texts of a dialogue that no other split may have: the longer ones."""
    return {"text": long_texts((*sample.context_turns, *sample.answer_turns))}


def _chats(request: SampleRequest, conversations: list[Conversation], rng: Random) -> Iterator[_Chat]:
    """Filled chats, each in one language; which languages come when follows from the order of the conversations."""
    ordered = sorted(conversations, key=lambda conversation: (conversation.tree, conversation.turns))
    rng.shuffle(ordered)
    room = request.length_tokens - 1 - count_turn_tokens(("",), request.tokenizer)[0]  # a start and the format's head
    filling: dict[str, _Chat] = defaultdict(lambda: _Chat(length_tokens=room))
    waiting: dict[str, list[tuple[tuple[str, ...], tuple[int, ...]]]] = defaultdict(list)
    for conversation in ordered:
        language, tokens = conversation.language, _turn_tokens(conversation, request)
        if sum(tokens[:2]) > room:
            request.report(f"conversation whose first exchange is longer than {request.length_tokens} tokens")
            continue
        waiting[language].append((conversation.turns, tokens))
        done = True
        while done:
            chat = filling[language]
            waiting[language] = [held for held in waiting[language] if chat.is_cut or not chat.take(*held)]
            done = chat.is_cut or (chat.is_filled and bool(waiting[language]))
            if done:
                yield filling.pop(language)
    for language, chat in filling.items():
        if chat.is_filled:
            yield chat
        else:
            request.report("conversation in a dialogue that others did not fill", chat.num_conversations)
        request.report("conversation that was too long for what others left", len(waiting[language]))


def _turn_tokens(conversation: Conversation, request: SampleRequest) -> tuple[int, ...]:
    # As the turns of a chat that has begun: what is written before the first turn of all counts once.
    counts = count_turn_tokens(("", "", *conversation.turns), request.tokenizer)
    return counts[2:]


def _sample(request: SampleRequest, chat: _Chat, index: int) -> Sample | None:
    """The chat cut into context and future; None where no turn cuts it well."""
    turns, tokens = list(chat.turns), list(chat.tokens)
    low, high = FUTURE_SHARES
    while sum(tokens) >= FILLED_SHARE * chat.length_tokens:
        shares = {cut: sum(tokens[cut:]) / sum(tokens) for cut in range(1, len(turns))}
        cut = min(shares, key=lambda place: abs(shares[place] - FUTURE_SHARE))
        sample = request.sample(
            index,
            context="\n\n".join(turns[:cut]),
            question="",
            answer_prefix="",
            answer="\n\n".join(turns[cut:]),
            references=(),
            max_new_tokens=0,
            context_turns=tuple(turns[:cut]),
            answer_turns=tuple(turns[cut:]),
        )
        if low <= shares[cut] <= high and count_all_tokens(sample, request.tokenizer) <= request.length_tokens:
            return sample
        del turns[-2:], tokens[-2:]  # a last exchange that is too long, or seams that made the whole too long
    return None
