"""The embedded model's tokenizer: a token for each byte, and the reserved ones behind them."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

NUM_RANKS = 256
NUM_RESERVED = 256

# Offset behind the ranks -> control token (k3-model.md section 8).
CONTROL_TOKENS: Mapping[int, str] = {
    0: "[BOS]",
    1: "[EOS]",
    2: "<|end_of_msg|>",
    3: "<|open|>",
    4: "<|close|>",
    5: "<|sep|>",
    6: "[start_header_id]",
    7: "[end_header_id]",
    9: "[EOT]",
    18: "<|media_begin|>",
    19: "<|media_content|>",
    20: "<|media_end|>",
    21: "<|media_pad|>",
    254: "[UNK]",
    255: "[PAD]",
}


def write_tokenizer(folder: Path, max_tokens: int) -> None:
    """Byte ranks in tiktoken's format, and the named control tokens behind them.

    Args:
      max_tokens: longest text of the model.
    """
    lines = [f"{base64.b64encode(bytes([rank])).decode()} {rank}\n" for rank in range(NUM_RANKS)]
    (folder / "tiktoken.model").write_text("".join(lines))
    added = {
        str(NUM_RANKS + offset): {
            "content": content,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": True,
        }
        for offset, content in CONTROL_TOKENS.items()
    }
    _write_json(
        folder / "tokenizer_config.json",
        {
            "added_tokens_decoder": added,
            "bos_token": CONTROL_TOKENS[0],
            "eos_token": CONTROL_TOKENS[2],
            "unk_token": CONTROL_TOKENS[254],
            "pad_token": CONTROL_TOKENS[255],
            "clean_up_tokenization_spaces": False,
            "model_max_length": max_tokens,
            "tokenizer_class": "TikTokenTokenizer",
        },
    )
    _write_json(
        folder / "generation_config.json",
        {
            "bos_token_id": NUM_RANKS,
            "eos_token_id": [NUM_RANKS + 2, NUM_RANKS + 1],
            "pad_token_id": NUM_RANKS + 255,
            "do_sample": True,
            "temperature": 1.0,
            "top_p": 1.0,
        },
    )


def _write_json(file: Path, value: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n")
