"""What the tests of the library share."""

from collections.abc import Callable

import jaxtyping
import pytest
import torch


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a caller without shape checks meets: the library's own errors."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


@pytest.fixture
def draw_tokens() -> Callable[..., torch.Tensor]:
    """Draws ordinary (not special) tokens of the tiny models: `draw_tokens(30)`."""

    def draw(*shape: int, seed: int = 0) -> torch.Tensor:
        return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed))

    return draw


@pytest.fixture
def fails_in_one_line() -> Callable[..., str]:
    """Runs something that must fail with the library's own error, and returns its one line."""
    from kvpolicy.errors import InputError

    def run(function: Callable[..., object], *args: object, **kwargs: object) -> str:
        with pytest.raises(InputError) as caught:
            function(*args, **kwargs)
        message = str(caught.value)
        assert message.strip() == message and message
        assert "\n" not in message
        return message

    return run
