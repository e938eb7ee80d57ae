"""What an error of a library says is to be done about it."""

from __future__ import annotations

import pytest

from storage.errors import remedy_for


@pytest.mark.parametrize(
    ("said", "remedy"),
    [
        ("Generic S3 error: Client error with status 403 Forbidden: no", "check the AWS_* credentials"),
        ("Server returned non-2xx status code: 503 Service Unavailable: busy", "the object store is overloaded"),
        ("<Code>NoSuchBucket</Code>", "make the bucket"),
        ("Permission denied (os error 13) at path", "make it readable and writable"),
        ("No space left on device (os error 28)", "make room"),
        ("No such file: /store/fragments/3f403ab04041d503f429/zarr.json", ""),
        ("No such file: /home/me/credentials/store/fragments/3f/zarr.json", ""),
        ("the checksum is 403, expected 1404", ""),
        ("no credentials in the property bag", "check AWS_ENDPOINT_URL"),
    ],
)
def test_a_remedy_is_told_by_words_and_not_by_digits(said: str, remedy: str) -> None:
    found = remedy_for(OSError(said))
    assert found.startswith(f"; {remedy}") if remedy else found == ""
