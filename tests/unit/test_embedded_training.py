"""Training of the embedded model: its forward pass is that of the server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[2] / "scripts"))

from embedded_training import config
from embedded_training.forward import forward
from embedded_training.mxfp4 import rounded, through
from embedded_training.tokenizer import write_tokenizer

from k3jax.draft.config import DraftConfig
from k3jax.weights import EMBEDDED_DRAFT, EMBEDDED_MODEL, load_params, read_model_config
from k3jax.weights.folder import read_json
from k3jax.weights.mxfp4 import dequantize, quantize
from sharding.axes import ParallelConfig
from sharding.mesh import make_mesh
from tests import oracle, tiny

ROOT = Path(__file__).parents[2]
CFG = tiny.tiny_config(packed=False)


def test_the_forward_pass_equals_the_oracle() -> None:
    params = tiny.random_params(CFG)
    tokens = np.random.default_rng(0).integers(0, CFG.vocab_size, 70).astype(np.int32)
    got = jax.jit(lambda p, t: forward(p, CFG, t, (1, 3)))(params, jnp.asarray(tokens))
    logits, stream = oracle.forward(CFG, params, tokens)
    np.testing.assert_allclose(got.logits, logits, atol=2e-4)
    np.testing.assert_allclose(got.taps, np.concatenate([stream[1], stream[3]], -1), atol=2e-4)
    assert got.load.shape == (len(CFG.moe_layers), CFG.num_experts)
    assert (np.asarray(got.load).sum(-1) == len(tokens) * CFG.experts_per_token).all()


def test_rounding_while_training_is_that_of_the_files() -> None:
    rng = np.random.default_rng(1)
    values = (rng.standard_normal((40, 96)) * 10.0 ** rng.uniform(-3, 1, (40, 1))).astype(
        np.float32
    )
    values[0, :32] = 0
    values[1, :6] = [2.5, 5.0, 0.25, 1.75, 3.5, 6.0]  # ties
    np.testing.assert_array_equal(rounded(jnp.asarray(values)), dequantize(*quantize(values)))
    gradient = jax.grad(lambda x: jnp.sum(through(x) * 3))(jnp.asarray(values))
    np.testing.assert_array_equal(gradient, 3)


def test_it_makes_what_the_package_has(tmp_path: Path) -> None:
    assert read_json(EMBEDDED_MODEL / "config.json") == config.model_config()
    assert read_json(EMBEDDED_DRAFT / "config.json") == config.draft_config()
    write_tokenizer(tmp_path, read_model_config(EMBEDDED_MODEL).max_position_tokens)
    written = sorted(tmp_path.iterdir())
    assert len(written) == 3
    for path in written:
        assert path.read_bytes() == (EMBEDDED_MODEL / path.name).read_bytes()


@pytest.mark.slow
def test_a_short_training_makes_checkpoints_that_load(tmp_path: Path) -> None:
    command = [sys.executable, "scripts/train_embedded.py", "--out", str(tmp_path), "--smoke"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=600)
    parallel = ParallelConfig()
    mesh = make_mesh(parallel)
    cfg = read_model_config(tmp_path / "model")
    load_params(tmp_path / "model", cfg, parallel, mesh, "bfloat16")
    draft = DraftConfig.from_hf(read_json(tmp_path / "draft" / "config.json"))
    draft.check_target(cfg)
    load_params(tmp_path / "draft", draft, parallel, mesh, "bfloat16")
    record = json.loads((tmp_path / "training.json").read_text())
    assert record["held_out_nats"] < 6.5
    assert {file["held_out"] for file in record["data"]["files"]} == {True, False}
