"""Text to token ids and back, from the files that a checkpoint ships.

Two formats are read: `tiktoken.model`, a rank file with K3's split pattern and 256 control tokens
after the ranks (k3-model.md section 8), and a byte-level `tokenizer.json`. Text is always ordinary
text: the spelling of a control token in a prompt never becomes that token, so a user cannot forge a
turn. Ids become bytes, and bytes become text only where a character is complete (KF-V14).
"""

from __future__ import annotations

import base64
import binascii
import codecs
import dataclasses
import io
import json
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import tiktoken
import tokenizers

RANKS_FILE = "tiktoken.model"
JSON_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
FILES = (RANKS_FILE, JSON_FILE, CONFIG_FILE)
NUM_CONTROL_TOKENS = 256

# How text was cut into words before K3's ranks were learned; another pattern gives other ids.
SPLIT_PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
# K3's own tokenizer cuts long text at these lengths, and equal ids need the same cuts. Without
# them the pattern's look-ahead overflows the native stack on a million spaces.
MAX_PIECE_CHARS = 400_000
MAX_RUN_CHARS = 25_000
_LONG_RUN = re.compile(rf"\S{{{MAX_RUN_CHARS + 1},}}|\s{{{MAX_RUN_CHARS + 1},}}")

MAX_FILE_BYTES = 256 << 20
_REPLACEMENT = "\ufffd".encode()


class TokenizerError(ValueError):
    """A tokenizer file cannot be used; the message names it."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tokenizer:
    """A vocabulary.

    Attributes:
      vocab: the bytes of each token id; empty for an id that the vocabulary leaves out.
      control_tokens: ids of the control tokens by name.
      eos_token_id: the end token that the tokenizer's configuration names, if any.
      encode: ids of a text. Never yields a control token.
      max_token_chars: the most characters of text that one id stands for; None where that is not
        known, because text is normalised first.
    """

    vocab: tuple[bytes, ...]
    control_tokens: Mapping[str, int]
    eos_token_id: int | None
    encode: Callable[[str], list[int]]
    max_token_chars: int | None


class Detokenizer:
    """Text of a growing sequence of ids. The joined pieces equal the text of the whole sequence.

    Args:
      skip: ids that yield no text, such as the end tokens.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip: Iterable[int] = ()):
        self._vocab = tokenizer.vocab
        self._skip = frozenset(skip)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: Iterable[int]) -> str:
        """Return the characters that `token_ids` complete."""
        return self._decoder.decode(b"".join(map(self._bytes, token_ids)))

    def finish(self) -> str:
        """Return what is left: a replacement character if the sequence ends inside a character."""
        return self._decoder.decode(b"", final=True)

    def _bytes(self, token_id: int) -> bytes:
        if token_id in self._skip:
            return b""
        return self._vocab[token_id] if token_id < len(self._vocab) else _REPLACEMENT


def load_folder(folder: Path) -> Tokenizer | None:
    """Read the tokenizer of a model folder, or return None if it has none.

    Raises:
      TokenizerError: there is one, but it cannot be used.
    """
    paths = (folder / name for name in FILES)
    return load_files({path.name: path.read_bytes() for path in paths if path.is_file()})


def load_zip(data: bytes) -> Tokenizer | None:
    """Read the tokenizer of a ZIP archive, as `GetTokenizer` sends it.

    Raises:
      TokenizerError: the archive or a file in it cannot be used.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = [info for info in archive.infolist() if info.filename in FILES]
            for info in members:
                if info.file_size > MAX_FILE_BYTES:
                    raise TokenizerError(
                        f"{info.filename} is too large: got {info.file_size} bytes; "
                        f"expected at most {MAX_FILE_BYTES}"
                    )
            return load_files({info.filename: archive.read(info) for info in members})
    except (zipfile.BadZipFile, EOFError) as error:
        raise TokenizerError(f"the tokenizer archive is damaged: {error}") from error


def load_files(files: Mapping[str, bytes]) -> Tokenizer | None:
    """Build the tokenizer from the contents of `FILES`, or return None if neither format is there.

    Raises:
      TokenizerError: a file cannot be used.
    """
    config = _json_object(files.get(CONFIG_FILE, b"{}"), CONFIG_FILE)
    if RANKS_FILE in files:
        return _from_ranks(files[RANKS_FILE], config)
    if JSON_FILE in files:
        return _from_json(files[JSON_FILE], config)
    return None


def split_long(text: str) -> Iterator[str]:
    """Cut a text into the pieces that are encoded alone; only very long texts have several."""
    for start in range(0, len(text), MAX_PIECE_CHARS):
        piece = text[start : start + MAX_PIECE_CHARS]
        begin = 0
        for run in _LONG_RUN.finditer(piece):
            for cut in range(run.start() + MAX_RUN_CHARS, run.end(), MAX_RUN_CHARS):
                yield piece[begin:cut]
                begin = cut
        yield piece[begin:]


def _from_ranks(data: bytes, config: Mapping[str, Any]) -> Tokenizer:
    ranks = _read_ranks(data)
    control = _control_tokens(config, first=len(ranks))
    encoding = tiktoken.Encoding(
        RANKS_FILE, pat_str=SPLIT_PATTERN, mergeable_ranks=ranks, special_tokens=control
    )

    def encode(text: str) -> list[int]:
        if len(text) <= MAX_RUN_CHARS:
            return encoding.encode_ordinary(text)
        return [id for piece in split_long(text) for id in encoding.encode_ordinary(piece)]

    vocab = [*sorted(ranks, key=ranks.__getitem__), *(name.encode() for name in control)]
    return Tokenizer(
        vocab=tuple(vocab),
        control_tokens=control,
        eos_token_id=_eos_token_id(config, control),
        encode=encode,
        max_token_chars=max(map(len, ranks)),
    )


def _read_ranks(data: bytes) -> dict[bytes, int]:
    """Parse lines of base64 token and rank."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(data.splitlines(), start=1):
        if not line:
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise TokenizerError(
                f"{RANKS_FILE} line {number} is not understood: expected a base64 token and a rank"
            ) from error
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise TokenizerError(
            f"{RANKS_FILE} has gaps or repeats: got {len(ranks)} different tokens; "
            f"expected the ranks 0 to {len(ranks) - 1}, one token each"
        )
    missing = sum(bytes([byte]) not in ranks for byte in range(256))
    if missing:
        raise TokenizerError(
            f"{RANKS_FILE} cannot spell every text: got {256 - missing} single bytes with a rank; "
            "expected all 256"
        )
    return ranks


def _control_tokens(config: Mapping[str, Any], *, first: int) -> dict[str, int]:
    """Name the ids after the ranks, in their order; what the configuration leaves is reserved."""
    names = {id: f"<|reserved_token_{id}|>" for id in range(first, first + NUM_CONTROL_TOKENS)}
    for id, name in _added_tokens(config).items():
        if id not in names:
            raise TokenizerError(
                f"{CONFIG_FILE} puts {name!r} out of range: got id {id}; expected {first} to "
                f"{first + NUM_CONTROL_TOKENS - 1}"
            )
        names[id] = name
    control = {name: id for id, name in names.items()}
    if len(control) != len(names):
        raise TokenizerError(f"{CONFIG_FILE} gives one name to two ids; expected different names")
    return control


def _added_tokens(config: Mapping[str, Any]) -> dict[int, str]:
    try:
        return {
            int(id): str(token["content"])
            for id, token in config.get("added_tokens_decoder", {}).items()
        }
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise TokenizerError(
            f"{CONFIG_FILE} has a bad added_tokens_decoder: expected ids with their content"
        ) from error


def _eos_token_id(config: Mapping[str, Any], control: Mapping[str, int]) -> int | None:
    match config.get("eos_token"):
        case str(name) | {"content": str(name)}:
            return control.get(name)
        case _:
            return None


def _from_json(data: bytes, config: Mapping[str, Any]) -> Tokenizer:
    description = _json_object(data, JSON_FILE)
    if not _is_byte_level(description.get("decoder")):
        raise TokenizerError(
            f"{JSON_FILE} is not byte-level: got another decoder; expected ByteLevel; "
            f"give {RANKS_FILE} instead"
        )
    try:
        native = tokenizers.Tokenizer.from_buffer(data)
    except Exception as error:  # the binding raises plain Exception
        raise TokenizerError(f"{JSON_FILE} is not understood: {error}") from error
    native.encode_special_tokens = True  # spelled-out control tokens are ordinary text
    added = {id: token.content for id, token in native.get_added_tokens_decoder().items()}
    control = {name: id for id, name in added.items()}
    vocab = [b""] * (max(native.get_vocab(with_added_tokens=True).values(), default=-1) + 1)
    for token, id in native.get_vocab(with_added_tokens=True).items():
        vocab[id] = token.encode() if id in added else _byte_level_bytes(token)
    return Tokenizer(
        vocab=tuple(vocab),
        control_tokens=control,
        eos_token_id=_eos_token_id(config, control),
        encode=lambda text: native.encode(text, add_special_tokens=False).ids,
        max_token_chars=None if description.get("normalizer") else max(map(len, vocab)),
    )


def _is_byte_level(decoder: Any) -> bool:
    match decoder:
        case {"type": "ByteLevel"}:
            return True
        case {"type": "Sequence", "decoders": [*parts]}:
            return any(_is_byte_level(part) for part in parts)
        case _:
            return False


def _byte_level_table() -> dict[str, int]:
    """Byte of each character that stands for one in a byte-level vocabulary.

    Printable Latin-1 characters stand for themselves; the other bytes follow from U+0100.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + i): byte for i, byte in enumerate(others)
    }


_BYTE_OF = _byte_level_table()


def _byte_level_bytes(token: str) -> bytes:
    try:
        return bytes(_BYTE_OF[character] for character in token)
    except KeyError as error:
        raise TokenizerError(
            f"{JSON_FILE} has a token that is not byte-level: got {token!r}; "
            "expected characters that stand for bytes"
        ) from error


def _json_object(data: bytes, name: str) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except ValueError as error:
        raise TokenizerError(f"{name} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{name} is not understood: expected a JSON object")
    return value  # pyright: ignore[reportUnknownVariableType]
