"""The options of the server, what they are refused for, and the exit codes."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from k3jax.config import ConfigError
from k3jax.weights import EMBEDDED_DRAFT, EMBEDDED_MODEL
from pallas_kernels.settings import KernelSettings
from serving import cli
from serving.cache_options import cache_policy
from serving.options import Options, build_parser, parse_options
from serving.page_table import PageGeometry
from serving.page_table.policy import CachePolicy
from serving.server import ServerError, StoppedWhileLoadingError
from serving.setup import EMBEDDED_NAME
from serving.tokenizer import TokenizerError
from sharding.axes import ParallelConfig
from tests.fakes import fake_geometry
from tests.unit.test_draft_config import SMALL_MLA

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "tests" / "data" / "k3-tiny"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whatever the program sets is undone, and nothing is written outside of the test's folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", os.environ.get("JAX_COMPILATION_CACHE_DIR", ""))
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    monkeypatch.setattr(cli, "configure_logs", lambda level: None)


def test_every_option_has_a_field_and_help():
    actions = [action for action in build_parser()._actions if action.dest != "help"]
    assert {action.dest for action in actions} == {f.name for f in dataclasses.fields(Options)}
    assert all(action.help for action in actions)


def test_defaults_serve_the_embedded_model_on_loopback():
    options = parse_options([])
    assert (options.model, options.mesh, options.dtype) == (None, "tp1", "bfloat16")
    assert (options.host, options.port) == ("127.0.0.1", 50051)


@pytest.mark.parametrize(
    ("text", "size"), [("1500", 1500), ("512M", 512 << 20), ("64GiB", 64 << 30), ("1K", 1024)]
)
def test_sizes_have_units(text: str, size: int):
    assert parse_options(["--pool-bytes", text]).pool_bytes == size


@pytest.mark.parametrize(
    "arguments",
    [
        ["--port", "65536"],
        ["--port", "x"],
        ["--max-rows", "0"],
        ["--max-rows", "nan"],
        ["--num-pages", "1"],
        ["--pool-bytes", "64 GB"],
        ["--pool-bytes", "0"],
        ["--num-pages", "9", "--pool-bytes", "1G"],
        ["--drain-seconds", "-1"],
        ["--drain-seconds", "nan"],
        ["--otlp-endpoint", "collector"],
        ["--otlp-endpoint", "collector:0"],
        ["--otlp-endpoint", "http://collector:4317"],
        ["--otlp-endpoint", "collector:4317/v1"],
        ["--dtype", "float64"],
        ["--prefix-cache", "maybe"],
        ["--hash-block-size", "0"],
        ["--state-retention", "0"],
        ["--state-retention", "none"],
        ["--experts", "dp"],
        ["--dispatch", "auto"],
        ["--tail", "on"],
        ["--max-row", "3"],
        ["surplus"],
    ],
    ids=" ".join,
)
def test_bad_option_is_one_line_and_exit_code_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit) as exit:
        parse_options(arguments)
    assert exit.value.code == 2
    text = capsys.readouterr().err
    assert text.startswith("serve.py: error: ")
    assert text.count("\n") == 1
    assert arguments[0] in text


def test_help_shows_every_group_and_needs_no_jax():
    program = "import sys; from serving import cli\ntry: cli.main(['--help'])\n" \
        "finally: print('jax' in sys.modules, file=sys.stderr)"  # fmt: skip
    run = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 0
    assert run.stderr.strip() == "False"
    for group in (
        "model:",
        "mesh:",
        "cache:",
        "prefix reuse:",
        "scheduling:",
        "network:",
        "exit codes:",
    ):
        assert f"\n{group}" in run.stdout


def test_prepare_reads_the_model_and_fills_in_what_was_left_open():
    setup = cli.prepare(parse_options(["--model", str(MODEL), "--max-rows", "2"]))
    config = json.loads((MODEL / "config.json").read_text())
    assert setup.info.name == "k3-tiny"
    assert setup.engine.max_prefill_rows == 2
    assert setup.engine.max_context_tokens == setup.model.max_position_tokens
    assert setup.info.architectures == tuple(config["architectures"])
    assert setup.tokenizer is None
    assert setup.bundle is None


def test_mesh_options_reach_the_model():
    arguments = ["--mesh=dp2xtp2", "--dispatch=all_to_all", "--tail=columns", "--shard-tokens=off"]
    setup = cli.prepare(parse_options(["--model", str(MODEL), *arguments]))
    assert setup.parallel == ParallelConfig(
        dp=2, tp=2, experts="ep", dispatch="all_to_all", tail="columns", shard_tokens="off"
    )


def test_speculation_options_reach_the_steps(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(draft_of_golden()))
    arguments = ["--model", str(MODEL), "--speculate=dspark", f"--draft={tmp_path}"]
    setup = cli.prepare(parse_options(arguments))
    assert setup.engine.num_drafts == 5
    assert cli.prepare(parse_options([*arguments, "--num-drafts=2"])).engine.num_drafts == 2
    with pytest.raises(ConfigError, match="too large: got 6; expected at most the 5 of the draft"):
        cli.prepare(parse_options([*arguments, "--num-drafts=6"]))
    setup = cli.prepare(parse_options([*arguments[:2], "--speculate=ngram"]))
    assert setup.engine.num_drafts == 4


def draft_of_golden() -> dict[str, Any]:
    """A draft's `config.json` that fits the golden model."""
    text = json.loads((MODEL / "config.json").read_text())["text_config"]
    return SMALL_MLA | {
        "hidden_size": text["hidden_size"],
        "target_hidden_size": text["hidden_size"],
        "vocab_size": text["vocab_size"],
        "draft_vocab_size": text["vocab_size"],
        "mask_token_id": text["vocab_size"] - 1,
        "block_size": 5,
    }


def test_kernel_options_reach_the_steps():
    arguments = ["--model", str(MODEL), "--kernels=xla", "--pdl=on"]
    setup = cli.prepare(parse_options(arguments))
    assert setup.engine.kernels == KernelSettings(implementation="xla", pdl=True)
    assert cli.prepare(parse_options(arguments[:2])).engine.kernels == KernelSettings()


def test_traces_without_their_library_are_refused_by_naming_the_extra(
    monkeypatch: pytest.MonkeyPatch,
):
    exporter = "opentelemetry.exporter.otlp.proto.grpc.trace_exporter"
    monkeypatch.setitem(sys.modules, exporter, None)
    monkeypatch.delitem(sys.modules, "serving.rpc.spans", raising=False)
    arguments = ["--model", str(MODEL), "--otlp-endpoint", "collector:4317"]
    with pytest.raises(ConfigError, match=r"got collector:4317, but .*; install the extra `otel`"):
        cli.prepare(parse_options(arguments))


def test_prepare_finds_the_embedded_model_its_tokenizer_and_its_draft():
    setup = cli.prepare(parse_options(["--speculate", "dspark"]))
    assert (setup.folder, setup.draft_dir) == (EMBEDDED_MODEL, EMBEDDED_DRAFT)
    assert setup.engine.num_drafts == 7
    assert cli.prepare(parse_options([])).draft_dir is None
    assert setup.info.name == EMBEDDED_NAME
    assert setup.bundle is not None
    assert setup.tokenizer is not None
    end = setup.tokenizer.control_tokens["<|end_of_msg|>"]
    assert end in setup.info.eos_token_ids
    assert setup.tokenizer.control_tokens["[EOS]"] in setup.info.eos_token_ids
    assert len(setup.tokenizer.vocab) == setup.model.vocab_size


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mesh", "8"], "mesh is not understood: got '8'"),
        (["--mesh", "tp3"], "does not divide over the mesh"),
        (["--max-context", "1000000"], "max_context_tokens is beyond the model: got 1000000"),
        (["--max-rows", "2", "--max-prefill-rows", "3"], "max_prefill_rows is too large: got 3"),
        (["--speculate", "dspark"], "--draft is missing: got --speculate dspark with a --model"),
        (["--draft", "x"], "--draft does not fit --speculate off: got x"),
        (["--speculate", "dspark", "--draft", "x"], "config.json cannot be read"),
    ],
)
def test_configuration_that_does_not_fit_is_refused(arguments: list[str], message: str):
    with pytest.raises(ConfigError, match=message):
        cli.prepare(parse_options(["--model", str(MODEL), *arguments]))


@pytest.mark.parametrize(
    ("page_tokens", "num_state_pages", "unit_tokens"),
    [
        (768, 3, 128),
        (5760, 3, 128),
        (192, 3, 64),
        (80, 1, 16),
        (5, 1, 1),
        (64, 0, 64),
        (192, 0, 192),
    ],
)
def test_prefix_key_has_128_tokens_unless_the_page_is_no_multiple(
    page_tokens: int, num_state_pages: int, unit_tokens: int
):
    geometry = fake_geometry(page_tokens=page_tokens, num_state_pages=num_state_pages)
    assert policy_of(geometry).unit_tokens == unit_tokens


def test_cache_options_reach_the_policy():
    options = parse_options([])
    assert (options.prefix_cache, options.answer_end_state) == ("on", "on")
    assert options.state_retention == "semantic"
    policy = cli.prepare(parse_options(["--model", str(MODEL)])).policy
    assert (policy.enabled, policy.retention_tokens, policy.keep_answer_end) == (True, 0, True)
    arguments = ["--prefix-cache", "off", "--state-retention", "dense", "--answer-end-state", "off"]
    policy = cli.prepare(parse_options(["--model", str(MODEL), *arguments])).policy
    assert (policy.enabled, policy.retention_tokens, policy.keep_answer_end) == (False, None, False)


def test_state_can_be_kept_every_so_many_tokens():
    assert policy_of(fake_geometry(page_tokens=64), state_retention=128).retention_tokens == 128


@pytest.mark.parametrize(("hash_block_size", "is_fine"), [(128, False), (64, True)])
def test_kf_c05_prefix_that_ends_inside_a_page_is_found(hash_block_size: int, is_fine: bool):
    policy = policy_of(fake_geometry(page_tokens=128), hash_block_size=hash_block_size)
    assert policy.key_every_unit == policy.checkpoint_junctions == is_fine


def test_model_without_recurrent_layers_exports_no_state():
    assert policy_of(fake_geometry(num_state_pages=3), export_tokens=16).export_tokens == 16
    assert policy_of(fake_geometry(num_state_pages=0), export_tokens=16).export_tokens is None


def test_kf_c18_sizes_that_do_not_divide_are_named_all_at_once():
    arguments = ["--hash-block-size", "100", "--state-retention", "1000"]
    with pytest.raises(ConfigError) as error:
        cli.prepare(parse_options(["--model", str(MODEL), *arguments]))
    unit, retention = error.value.problems
    assert "got 100; expected a divisor of page_tokens = 128" in unit
    assert "got 1000; expected 0 or a multiple of page_tokens = 128" in retention
    assert "--hash-block-size" in unit
    assert "--state-retention" in retention


def test_kf_c18_prefix_key_of_a_model_without_recurrent_layers_is_the_page():
    geometry = fake_geometry(page_tokens=64, num_state_pages=0)
    assert policy_of(geometry, hash_block_size=64).unit_tokens == 64
    with pytest.raises(ConfigError, match="got 32; expected page_tokens = 64"):
        policy_of(geometry, hash_block_size=32)


def test_record_of_an_earlier_run_is_not_overwritten(tmp_path: Path):
    (tmp_path / "record").write_text("old")
    with pytest.raises(ConfigError, match=r"record exists already: got .*record; expected a new"):
        cli.prepare(parse_options(["--model", str(MODEL), "--record", str(tmp_path / "record")]))


def test_folder_without_config_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"config\.json") as error:
        cli.prepare(parse_options(["--model", str(tmp_path)]))
    assert str(tmp_path) in str(error.value)


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ConfigError("one thing"), 2, "one thing"),
        (ConfigError(["one thing", "another"]), 2, "2 problems: (1) one thing; (2) another"),
        (TokenizerError("bad file"), 2, "bad file"),
        (ServerError("port is in use"), 1, "port is in use"),
        (PermissionError(13, "Permission denied", "/x"), 1, "[Errno 13] Permission denied: '/x'"),
    ],
    ids=["one problem", "two problems", "tokenizer", "server", "files"],
)
def test_error_is_one_line_with_its_exit_code(
    error: Exception,
    code: int,
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.setattr(cli, "prepare", _raising(error))
    assert cli.main([]) == code
    assert capsys.readouterr().err == f"serve.py: error: {line}\n"


def test_stop_while_loading_leaves_the_busy_thread_behind(monkeypatch: pytest.MonkeyPatch):
    codes: list[int] = []
    monkeypatch.setattr(cli, "prepare", _raising(StoppedWhileLoadingError("stopped")))
    monkeypatch.setattr(os, "_exit", codes.append)
    cli.main([])
    assert codes == [0]


def policy_of(geometry: PageGeometry, **options: Any) -> CachePolicy:
    defaults: dict[str, Any] = {
        "is_enabled": True,
        "hash_block_size": None,
        "state_retention": "semantic",
        "keep_answer_end": True,
    }
    return cache_policy(geometry, **defaults | options)


def _raising(error: Exception):
    def prepare(options: Options):
        raise error

    return prepare
