"""What a run notes of its surroundings."""

from __future__ import annotations

import pytest

from storage.environment import environment, public_url


def test_the_environment_names_what_it_runs_on() -> None:
    around = environment()
    assert around.packages["zarr"] and around.packages["pytest"]
    assert " x " in around.hardware and "GiB" in around.hardware
    assert around is environment()
    assert set(around.to_json()) == {"python", "platform", "hardware", "threads", "packages"}


@pytest.mark.parametrize(
    ("remote", "shown"),
    [
        ("https://me:token@example.org/a/b.git", "https://example.org/a/b.git"),
        ("https://example.org/a/b.git?token=x", "https://example.org/a/b.git"),
        ("git@example.org:a/b.git", "ssh://example.org/a/b.git"),
        ("/srv/git/b.git", ""),
        ("", ""),
    ],
)
def test_remotes_show_no_credentials(remote: str, shown: str) -> None:
    assert public_url(remote) == shown
