"""What the server tells: the model, its tokenizer bundle, its load, its log lines."""

from __future__ import annotations

import json
import logging
import re
import zipfile
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

from k3jax.config import ConfigError
from serving.rpc.bundle import build_bundle, bundle_pieces
from serving.rpc.loads import RateMeter
from serving.rpc.logs import EventFormatter
from serving.rpc.model_info import ModelInfo, read_model_info
from serving.tokenizer import load_folder
from tests.server.harness import write_model_folder
from tests.tiny import tiny_config


def info_of(folder: Path, generation: dict[str, Any] | None = None) -> ModelInfo:
    write_model_folder(folder)
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return read_model_info(
        folder,
        tiny_config(),
        load_folder(folder),
        name=None,
        max_context_tokens=100,
    )


def test_kf_v19_end_ids_of_all_files_are_taken(tmp_path: Path):
    cfg = tiny_config()
    info = info_of(tmp_path, {"eos_token_id": [7, 5]})
    assert set(info.eos_token_ids) == {5, 7, *cfg.eos_token_ids}


def test_sampling_defaults_are_those_that_requests_can_have(tmp_path: Path):
    generation = {"temperature": 0.6, "top_p": 0.95, "top_k": None, "min_p": 0.1, "do_sample": True}
    info = info_of(tmp_path, generation)
    assert info.default_temperature == 0.6
    sent = json.loads(info.message().default_sampling_params_json)
    assert sent == {"temperature": 0.6, "top_p": 0.95, "min_p": 0.1}


def test_model_info_message_has_what_a_gateway_needs(tmp_path: Path):
    message = info_of(tmp_path).message()
    assert message.served_model_name == tmp_path.name
    assert message.model_path == message.tokenizer_path == str(tmp_path)
    assert message.model_type == "kimi_k3"
    assert message.max_context_length == 100
    assert message.is_generation
    assert not message.supports_vision


@pytest.mark.parametrize(
    ("generation", "message"),
    [
        ({"eos_token_id": "x"}, "eos_token_id of generation_config.json is not understood"),
        ({"eos_token_id": 10**6}, "not in the vocabulary"),
        ({"temperature": "hot"}, "temperature of generation_config.json"),
    ],
)
def test_bad_generation_config_is_refused(tmp_path: Path, generation: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        info_of(tmp_path, generation)


def test_bundle_holds_tokenizer_configurations_and_templates_only(tmp_path: Path):
    write_model_folder(tmp_path)
    for name in ("chat.jinja", "model.safetensors", "tokenization_kimi.py"):
        (tmp_path / name).write_text("x")
    archive = zipfile.ZipFile(BytesIO(build_bundle(tmp_path).data))
    assert set(archive.namelist()) == {
        "tiktoken.model", "tokenizer_config.json", "config.json", "chat.jinja",
    }  # fmt: skip


def test_bundle_of_the_same_files_is_the_same(tmp_path: Path):
    write_model_folder(tmp_path)
    first = build_bundle(tmp_path)
    write_model_folder(tmp_path)  # newer files, same content
    assert build_bundle(tmp_path) == first


def test_only_the_last_piece_has_the_checksum(tmp_path: Path):
    bundle = build_bundle(write_model_folder(tmp_path))
    *others, last = bundle_pieces(bundle)
    assert not any(piece.sha256 for piece in others)
    assert last.sha256 == bundle.sha256


def test_rate_is_of_the_time_between_readings():
    meter = RateMeter(now_s=100.0)
    assert meter.read(50, now_s=105.0) == 10.0
    assert meter.read(60, now_s=105.5) == 10.0  # too soon to tell
    assert meter.read(90, now_s=107.0) == 20.0
    assert meter.read(90, now_s=117.0) == 0.0


def test_log_line_has_time_level_event_and_fields():
    record = logging.makeLogRecord(
        {"msg": "request", "levelname": "INFO", "levelno": 20,
         "fields": {"id": "a b", "seconds": 0.25, "status": "OK", "empty": ""}}
    )  # fmt: skip
    line = EventFormatter().format(record)
    assert re.fullmatch(
        r'\d{4}-\d\d-\d\dT[\d:.]+Z info request id="a b" seconds=0.25 status=OK empty=""', line
    )


def test_log_line_shows_the_fields_of_other_modules():
    record = logging.makeLogRecord({"msg": "event", "levelname": "INFO", "request_id": "a"})
    assert EventFormatter().format(record).endswith(" info event request_id=a")


def test_log_line_cannot_be_forged_by_a_value():
    record = logging.makeLogRecord(
        {"msg": "request", "levelname": "INFO", "fields": {"id": "a\n2026 error x"}}
    )
    assert "\n" not in EventFormatter().format(record)
