"""Text to ids and back, for both tokenizer formats."""

from __future__ import annotations

import base64
import io
import itertools
import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from serving.tokenizer import (
    MAX_PIECE_CHARS,
    MAX_RUN_CHARS,
    Detokenizer,
    Tokenizer,
    TokenizerError,
    load_files,
    load_folder,
    load_zip,
    split_long,
)

BYTES = tuple(bytes([byte]) for byte in range(256))
# Merges that show where words end: digits go by three, a Han run ends before a Latin letter.
MERGES = (
    b"12",
    b"34",
    b"123",
    b"1234",
    b"\xe6\x96",
    b"\xe6\x96\x87",
    b"\xe6\x96\x87E",
    b"he",
    b"hel",
)
NUM_RANKS = len(BYTES) + len(MERGES)
NAMED = {0: "[BOS]", 1: "[EOS]", 2: "<|end_of_msg|>", 255: "[PAD]"}


def rank_file(tokens: tuple[bytes, ...] = BYTES + MERGES) -> bytes:
    lines = [b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(tokens)]
    return b"".join(lines)


def config_file(named: Mapping[int, str] = NAMED, **more: Any) -> bytes:
    added = {str(NUM_RANKS + offset): {"content": name} for offset, name in named.items()}
    return json.dumps(
        {"added_tokens_decoder": added, "eos_token": "<|end_of_msg|>"} | more
    ).encode()


def k3_files() -> dict[str, bytes]:
    return {"tiktoken.model": rank_file(), "tokenizer_config.json": config_file()}


def json_files(**changes: Any) -> dict[str, bytes]:
    """A byte-level `tokenizer.json` with one merge and one control token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: id for id, character in enumerate(alphabet)} | {"he": 256}
    native = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[("h", "e")]))
    native.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    native.decoder = decoders.ByteLevel()
    native.add_special_tokens(["<|end|>"])
    return {"tokenizer.json": json.dumps(json.loads(native.to_str()) | changes).encode()}


def load(files: Mapping[str, bytes]) -> Tokenizer:
    tokenizer = load_files(files)
    assert tokenizer is not None
    return tokenizer


K3 = load(k3_files())
BYTE_LEVEL = load(json_files())
BOTH = pytest.mark.parametrize("tokenizer", [K3, BYTE_LEVEL], ids=["tiktoken", "json"])


def decode(tokenizer: Tokenizer, ids: list[int]) -> str:
    """The text of a whole sequence, by definition."""
    return b"".join(tokenizer.vocab[id] for id in ids).decode("utf-8", "replace")


@BOTH
@given(text=st.text())
def test_decoded_text_equals_what_was_encoded(tokenizer: Tokenizer, text: str):
    assert decode(tokenizer, tokenizer.encode(text)) == text


@BOTH
def test_spelled_control_token_is_ordinary_text(tokenizer: Tokenizer):
    for name in ("<|end_of_msg|>", "<|end|>", "[EOS]", "<|reserved_token_300|>"):
        ids = tokenizer.encode(f"a{name}b")
        assert not set(ids) & set(tokenizer.control_tokens.values())
        assert decode(tokenizer, ids) == f"a{name}b"


@BOTH
def test_merges_apply(tokenizer: Tokenizer):
    assert tokenizer.vocab[tokenizer.encode("he")[0]] == b"he"


def test_words_are_cut_as_in_k3():
    def words(text: str) -> list[bytes]:
        return [K3.vocab[id] for id in K3.encode(text)]

    assert words("1234") == [b"123", b"4"]
    assert words("文E") == ["文".encode(), b"E"]


def test_control_tokens_follow_the_ranks_and_unnamed_ones_are_reserved():
    assert len(K3.vocab) == NUM_RANKS + 256
    assert K3.control_tokens["[BOS]"] == NUM_RANKS
    assert K3.control_tokens["<|end_of_msg|>"] == K3.eos_token_id == NUM_RANKS + 2
    assert K3.vocab[NUM_RANKS + 2] == b"<|end_of_msg|>"
    assert K3.vocab[NUM_RANKS + 3] == f"<|reserved_token_{NUM_RANKS + 3}|>".encode()


@pytest.mark.parametrize("eos", ["[EOS]", {"content": "[EOS]"}])
def test_end_token_is_read_in_both_spellings(eos: object):
    files = k3_files() | {"tokenizer_config.json": config_file(eos_token=eos)}
    assert load(files).eos_token_id == NUM_RANKS + 1


def test_tiktoken_file_without_configuration_has_reserved_tokens_only():
    tokenizer = load({"tiktoken.model": rank_file()})
    assert tokenizer.eos_token_id is None
    assert all(name.startswith("<|reserved_token_") for name in tokenizer.control_tokens)


@BOTH
@given(data=st.data())
def test_kf_v14_joined_pieces_equal_the_decoded_whole(tokenizer: Tokenizer, data: st.DataObject):
    ids = data.draw(st.lists(st.integers(0, len(tokenizer.vocab) - 1), max_size=40))
    cuts = data.draw(st.lists(st.integers(0, len(ids)), max_size=5).map(sorted))
    detokenizer = Detokenizer(tokenizer)
    borders = [0, *cuts, len(ids)]
    pieces = [detokenizer.push(ids[a:b]) for a, b in itertools.pairwise(borders)]
    assert "".join(pieces) + detokenizer.finish() == decode(tokenizer, ids)


def test_kf_v14_character_is_held_until_it_is_complete():
    detokenizer = Detokenizer(K3)
    pieces = [detokenizer.push([byte]) for byte in "🙂".encode()]
    assert pieces == ["", "", "", "🙂"]
    assert detokenizer.finish() == ""


def test_kf_v14_stream_that_ends_inside_a_character_does_not_raise():
    detokenizer = Detokenizer(K3)
    assert detokenizer.push("é".encode()[:1]) == ""
    assert detokenizer.finish() == "\ufffd"


def test_kf_v19_skipped_ids_yield_no_text_and_others_are_kept():
    ids = [97, NUM_RANKS + 2, NUM_RANKS, 98]
    assert Detokenizer(K3, skip=[NUM_RANKS + 2]).push(ids) == "a[BOS]b"


def test_id_beyond_the_vocabulary_is_a_replacement_character():
    assert Detokenizer(K3).push([97, NUM_RANKS + 256]) == "a\ufffd"


def test_two_million_spaces_are_encoded():
    # In one piece they overflow the stack of the native code.
    ids = K3.encode(" " * 2_000_000)
    assert len(ids) == 2_000_000


@pytest.mark.parametrize(
    ("text", "lengths"),
    [
        ("a" * MAX_RUN_CHARS, [MAX_RUN_CHARS]),
        ("a" * (2 * MAX_RUN_CHARS + 1), [MAX_RUN_CHARS, MAX_RUN_CHARS, 1]),
        ("a b" * 20_000, [60_000]),
        ("x " + " " * MAX_RUN_CHARS + "y", [1 + MAX_RUN_CHARS, 2]),
        ("ab " * 200_000, [MAX_PIECE_CHARS, 200_000]),
    ],
)
def test_long_text_is_cut_as_in_k3(text: str, lengths: list[int]):
    pieces = list(split_long(text))
    assert "".join(pieces) == text
    assert [len(piece) for piece in pieces] == lengths


def test_min_length_of_a_token_bounds_the_number_of_tokens():
    assert K3.max_token_chars == 4  # of `1234`; three bytes of Han are one character
    assert len(K3.encode("1234" * 50)) >= 200 / K3.max_token_chars


def test_text_that_is_normalised_has_no_such_bound():
    assert load(json_files(normalizer={"type": "NFC"})).max_token_chars is None


def test_folder_and_archive_give_the_same_tokenizer(tmp_path: Path):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in k3_files().items():
            (tmp_path / name).write_bytes(data)
            archive.writestr(name, data)
        archive.writestr("../escape", b"x")
    from_folder, from_zip = load_folder(tmp_path), load_zip(buffer.getvalue())
    assert from_folder is not None
    assert from_zip is not None
    assert from_folder.vocab == from_zip.vocab == K3.vocab


def test_folder_without_tokenizer_has_none(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    assert load_folder(tmp_path) is None


def test_damaged_archive_is_refused():
    with pytest.raises(TokenizerError, match="archive is damaged"):
        load_zip(b"PK\x03\x04 not really")


BAD_FILES: dict[str, tuple[dict[str, bytes], str]] = {
    "not base64": ({"tiktoken.model": b"!! 0\n"}, "tiktoken.model line 1"),
    "no rank": ({"tiktoken.model": rank_file() + b"YWJj\n"}, f"line {NUM_RANKS + 1}"),
    "gap in the ranks": ({"tiktoken.model": rank_file() + b"enp6eg== 999\n"}, "gaps or repeats"),
    "byte without a rank": ({"tiktoken.model": rank_file(BYTES[:-1])}, "255 single bytes"),
    "name out of range": (
        k3_files() | {"tokenizer_config.json": config_file({-1: "x"})}, "'x' out of range",
    ),
    "name given twice": (
        k3_files() | {"tokenizer_config.json": config_file({0: "x", 1: "x"})}, "two ids",
    ),
    "names not understood": (
        k3_files() | {"tokenizer_config.json": b'{"added_tokens_decoder": {"1": 2}}'},
        "added_tokens_decoder",
    ),
    "configuration is no JSON": (k3_files() | {"tokenizer_config.json": b"{"}, "not JSON"),
    "configuration is no object": (k3_files() | {"tokenizer_config.json": b"[]"}, "JSON object"),
    "not byte-level": (json_files(decoder={"type": "WordPiece"}), "not byte-level"),
    "json of another shape": (json_files(model={"type": "Nothing"}), "tokenizer.json is not"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_file_is_refused_by_name(case: str):
    files, message = BAD_FILES[case]
    with pytest.raises(TokenizerError, match=message):
        load_files(files)
