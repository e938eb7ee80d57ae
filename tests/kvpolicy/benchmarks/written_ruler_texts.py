"""Small files that look as the public texts of RULER do: essays, SQuAD, HotpotQA."""

import json
from pathlib import Path
from random import Random

_NOUNS = ("river", "lamp", "garden", "captain", "letter", "window", "sister", "bridge", "kettle", "harbour", "doctor")
_VERBS = ("followed", "painted", "forgot", "carried", "answered", "repaired", "welcomed", "counted", "borrowed")


def prose(num_sentences: int, rng: Random) -> str:
    lines = [
        f"On day {day} the {rng.choice(_NOUNS)} of Mr. Hale {rng.choice(_VERBS)} the {rng.choice(_NOUNS)}, "
        f"and the {rng.choice(_NOUNS)} {rng.choice(_VERBS)} it."
        for day in range(num_sentences)
    ]
    for place in range(0, num_sentences, 17):
        lines.insert(place, "Nobody in the whole village said anything at all." if place % 2 else '"Yes!"')
    return "\n".join(lines)


def write_squad(path: Path, *, num_articles: int = 24) -> Path:
    rng = Random(1)
    articles = []
    for article in range(num_articles):
        paragraphs = []
        for number in range(4):
            place = f"Port {article}-{number}"
            context = f"{place} was founded in {1500 + 7 * article + number}. " + prose(3, rng).replace("\n", " ")
            answer = {"text": str(1500 + 7 * article + number), "answer_start": context.index("1")}
            answerable = {
                "id": f"{article}.{number}.a",
                "question": f"When was {place} founded?",
                "answers": [answer, answer],
                "is_impossible": False,
            }
            impossible = {
                "id": f"{article}.{number}.i",
                "question": f"Who sold {place}?",
                "answers": [],
                "is_impossible": True,
            }
            paragraphs.append({"context": context, "qas": [answerable, impossible]})
        articles.append({"title": f"Ports {article}", "paragraphs": paragraphs})
    path.write_text(json.dumps({"version": "v2.0", "data": articles}))
    return path


def write_hotpotqa(path: Path, *, num_questions: int = 40) -> Path:
    rng = Random(2)
    entries = []
    for number in range(num_questions):
        gold = [(f"Person {number}{part}", [f"Person {number}{part} was born in 19{number:02}.", " "]) for part in "ab"]
        common = [(f"Town {town}", [prose(8, Random(town)).replace("\n", " ")]) for town in rng.sample(range(60), 5)]
        context = [*gold, *common]
        rng.shuffle(context)
        entries.append(
            {
                "_id": f"q{number}",
                "question": f"Were Person {number}a and Person {number}b born in one year?",
                "answer": "yes",
                "supporting_facts": [[title, 0] for title, _ in gold],
                "context": [[title, sentences] for title, sentences in context],
            }
        )
    path.write_text(json.dumps(entries))
    return path
