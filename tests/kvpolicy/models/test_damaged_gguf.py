"""GGUF files with bytes that lie: one line, at once, and nothing left behind."""

import struct

import pytest
import transformers

from kvpolicy.errors import InputError
from kvpolicy.models.convert import convert_gguf
from kvpolicy.models.gguf_file import ArchitectureFields, GgufFile
from tests.tiny_gguf import write_tiny_gguf

pytestmark = pytest.mark.skipif(not hasattr(transformers, "GgufConfig"), reason="this transformers reads no GGUF files")


def _set_field(content, name, kind, number):
    """The file with other bytes as a number that the header has."""
    start = content.index(name) + len(name) + 4  # behind the number of its type
    return content[:start] + struct.pack(kind, number) + content[start + struct.calcsize(kind) :]


def _set_offset(content, number):
    """The file with another place of a matrix: after its name there are its shape and its type."""
    start = content.index(b"blk.0.attn_q.weight") + len(b"blk.0.attn_q.weight") + 4 + 2 * 8 + 4
    return content[:start] + struct.pack("<Q", number) + content[start + 8 :]


def _change_endian(content):
    return content[:4] + struct.pack(">I", 3) + struct.pack(">QQ", 0, 0)


DAMAGED = {
    "billions of layers": (
        lambda content: _set_field(content, b"llama.block_count", "<I", 2**31),
        "its header has 2147483648 layers",
    ),
    "no heads": (
        lambda content: _set_field(content, b"llama.attention.head_count", "<I", 0),
        "its header has no llama.attention.head_count, or zero",
    ),
    "a base that is not a number": (
        lambda content: _set_field(content, b"llama.rope.freq_base", "<f", float("nan")),
        "its header has llama.rope.freq_base = nan",
    ),
    "text that is none": (lambda content: content.replace(b"tiny", b"t\xffny"), "is not UTF-8"),
    "a tensor on another": (lambda content: _set_offset(content, 0), "tensor blk.0.attn_q.weight begins at byte"),
    "a tensor between bytes": (lambda content: _set_offset(content, 3), "tensor blk.0.attn_q.weight begins at byte"),
    "the other order of bytes": (_change_endian, "big-endian"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_bytes_that_lie_are_one_line(tmp_path, fails_in_one_line, case):
    damage, message = DAMAGED[case]
    gguf = write_tiny_gguf(tmp_path / "tiny.gguf")
    gguf.write_bytes(damage(gguf.read_bytes()))
    said = fails_in_one_line(convert_gguf, gguf, tmp_path / "out" / "model")
    assert str(gguf) in said and message in said
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("value", ["x", True, 2.5, -1, float("inf")])
def test_a_field_of_another_type_than_a_count_is_refused(tmp_path, value):
    file = GgufFile(path=tmp_path, fields={"general.architecture": "llama", "llama.context_length": value}, tensors={})
    with pytest.raises(InputError, match=r"its header has llama\.context_length = "):
        ArchitectureFields(file).count("context_length")
    with pytest.raises(InputError, match=r"its header has no llama\.block_count"):
        ArchitectureFields(file).count("block_count")
    assert ArchitectureFields(file).count("block_count", 3) == 3
