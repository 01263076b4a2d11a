"""The tokenizer bundle that `GetTokenizer` streams: one ZIP of the files that a gateway needs."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import zipfile
from collections.abc import Iterator
from pathlib import Path

from serving.rpc.protocol import common
from serving.tokenizer import FILES, TokenizerError

# Besides the tokenizer: the gateway reads the architecture and the end ids.
MODEL_FILES = ("config.json", "generation_config.json")
PIECE_BYTES = 64 << 10
MAX_BUNDLE_BYTES = 200 << 20  # what a gateway accepts
# A fixed date: the same files are the same archive after a restart, and on every replica.
_DATE = (1980, 1, 1, 0, 0, 0)


@dataclasses.dataclass(frozen=True, slots=True)
class Bundle:
    """A ZIP archive and the SHA-256 of its bytes in hex."""

    data: bytes
    sha256: str


def build_bundle(folder: Path) -> Bundle:
    """Pack the tokenizer, the configurations and the chat templates of a model folder.

    Raises:
      TokenizerError: the archive is larger than a gateway accepts.
    """
    names = [*FILES, *MODEL_FILES, *sorted(path.name for path in folder.glob("*.jinja"))]
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name in names:
            if (folder / name).is_file():
                info = zipfile.ZipInfo(name, _DATE)
                info.compress_type = zipfile.ZIP_DEFLATED
                archive.writestr(info, (folder / name).read_bytes())
    data = buffer.getvalue()
    if len(data) > MAX_BUNDLE_BYTES:
        raise TokenizerError(
            f"the tokenizer bundle of {folder} is too large: got {len(data)} bytes; "
            f"expected at most {MAX_BUNDLE_BYTES}"
        )
    return Bundle(data, hashlib.sha256(data).hexdigest())


def bundle_pieces(bundle: Bundle) -> Iterator[common.GetTokenizerChunk]:
    """Cut a bundle into messages. The last, and only that, carries the checksum."""
    for start in range(0, len(bundle.data), PIECE_BYTES):
        end = start + PIECE_BYTES
        is_last = end >= len(bundle.data)
        yield common.GetTokenizerChunk(
            data=bundle.data[start:end], sha256=bundle.sha256 if is_last else ""
        )
