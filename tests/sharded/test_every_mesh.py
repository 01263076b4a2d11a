"""Every mesh with every way to exchange tokens and to sum results, against expected logits.

The models of four heads are compared with what other implementations produced, one of eight heads
with the float64 oracle.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from serving.score import score
from tests import oracle, ragged, tiny
from tests.models import load_folder, relative_error

TOLERANCE = 2e-4
MESHES = [(1, 1), (1, 2), (1, 4), (1, 8), (2, 1), (2, 4), (4, 2), (8, 1)]
EXPERTS = ("ep", "tp")
DISPATCHES = ("all_gather", "all_to_all", "ragged")
TAILS = ("all_reduce", "columns", "folded")
CHUNK, NUM_DECODE = 32, 5
SIZES: dict[str, Any] = {
    "packed": False,
    "num_experts": 16,
    "linear_attn_config": {"num_heads": 8, "head_dim": 6},
}

pytestmark = [pytest.mark.slow, pytest.mark.multi]


def forms() -> Iterator[dict[str, Any]]:
    """Combinations that differ on their mesh: there is no tail without `tp`, and no exchange
    between ranks that have the same tokens."""
    for (dp, tp), experts in itertools.product(MESHES, EXPERTS):
        mesh = {"dp": dp, "tp": tp, "experts": experts}
        dispatches = DISPATCHES if dp > 1 else DISPATCHES[:1]
        tails = TAILS if tp > 1 else TAILS[:1]
        for form, tail in itertools.product(dispatches, tails):
            yield {**mesh, "dispatch": form, "tail": tail, "shard_tokens": "off"}
        if tp > 1:
            for form in DISPATCHES:
                yield {**mesh, "dispatch": form, "shard_tokens": "on"}


def name_of(form: dict[str, Any]) -> str:
    tail = form.get("tail", "sharded")
    return f"dp{form['dp']}xtp{form['tp']}-{form['experts']}-{form['dispatch']}-{tail}"


@pytest.fixture(scope="module")
def eight_heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "eight-heads"
    tiny.write_tiny_checkpoint(folder, **SIZES)
    return folder


@pytest.mark.parametrize("form", list(forms()), ids=name_of)
def test_logits(form: dict[str, Any], eight_heads: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ragged.emulate_on_cpu(monkeypatch)
    if form["tp"] == 8:
        folder = eight_heads
        cfg = tiny.tiny_config(**SIZES)
        tokens = np.random.default_rng(3).integers(0, cfg.vocab_size, 70).astype(np.int32)
        want, _ = oracle.forward(cfg, tiny.random_params(cfg), tokens)
    else:
        folder = tiny.DATA / "k3-tiny"
        with np.load(folder / "expected.npz") as file:
            tokens, want = file["len70.tokens"].astype(np.int32), file["len70.logits"]
    got = score(load_folder(folder, **form), tokens, chunk=CHUNK, num_decode=NUM_DECODE)
    assert relative_error(got, want) <= TOLERANCE
    np.testing.assert_array_equal(got.argmax(-1), want.argmax(-1))
