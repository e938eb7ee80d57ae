from collections.abc import Iterator
from itertools import accumulate

from hypothesis import given, settings
from hypothesis import strategies as st

from kvpolicy.benchmarks.ruler.prompt_plan import Lazy, largest_fitting


@given(
    steps=st.lists(st.integers(0, 50), min_size=1, max_size=400),
    smallest=st.integers(0, 20),
    budget=st.integers(0, 5000),
    bounded=st.booleans(),
)
def test_it_finds_what_a_linear_search_finds(steps: list[int], smallest: int, budget: int, bounded: bool) -> None:
    totals = list(accumulate(steps))
    last = smallest + len(steps) - 1

    def tokens_of(size: int) -> int:
        assert smallest <= size and (not bounded or size <= last)
        inside = min(size, last) - smallest
        return totals[inside] + 7 * max(0, size - last)

    fitting = [size for size in range(smallest, last + 1 + 5000 * (not bounded)) if tokens_of(size) <= budget]
    found = largest_fitting(tokens_of, budget=budget, smallest=smallest, largest=last if bounded else None)
    assert found == (max(fitting) if fitting else None)


@settings(max_examples=50)
@given(per_unit=st.floats(1, 40), fixed=st.integers(20, 500), budget=st.integers(1000, 150_000))
def test_even_text_takes_few_counts(per_unit: float, fixed: int, budget: int) -> None:
    calls = []

    def tokens_of(size: int) -> int:
        calls.append(size)
        return fixed + int(per_unit * size)

    found = largest_fitting(tokens_of, budget=budget, smallest=1)
    assert found is not None and tokens_of(found) <= budget < tokens_of(found + 1)
    assert len(calls) <= 10


def test_lazy_items_are_drawn_once_and_only_as_far_as_needed() -> None:
    drawn = []

    def items() -> Iterator[str]:
        for number in range(5):
            drawn.append(number)
            yield str(number)

    lazy = Lazy(items())
    assert lazy.first(2) == ["0", "1"] and drawn == [0, 1]
    assert lazy.first(1) == ["0"] and drawn == [0, 1]
    assert lazy.first(9) == ["0", "1", "2", "3", "4"]
