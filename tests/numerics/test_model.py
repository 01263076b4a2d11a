"""The whole model against a float64 oracle of independent form: residual patterns, chunking, every
layer."""

from __future__ import annotations

import numpy as np
import pytest

from k3jax.buckets import Bucket
from tests import oracle, tiny
from tests.models import Row, open_model, program_of, relative_error, run_rows

TOLERANCE = 1e-4
PREFILL = Bucket("prefill", 40, 1, 3)


def tokens_of(length: int, vocab_size: int, seed: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, vocab_size, length).astype(np.int32)


# Blocks that end short, and such that divide the layers exactly.
@pytest.mark.parametrize(
    ("num_layers", "block", "mla_layers"),
    [
        pytest.param(5, 2, [3, 5], marks=pytest.mark.slow),  # that of test_independence, too
        (7, 3, [4, 6, 7]),
        (4, 2, [2, 4]),
    ],
)
def test_kf_m05_attention_residual_banks_equal_keeping_everything(
    num_layers: int, block: int, mla_layers: list[int]
) -> None:
    kda_layers = [i for i in range(1, num_layers + 1) if i not in mla_layers]
    cfg = tiny.tiny_config(
        num_hidden_layers=num_layers,
        attn_res_block_size=block,
        routed_scaling_factor=2.5,
        linear_attn_config={"full_attn_layers": mla_layers, "kda_layers": kda_layers},
    )
    params = tiny.random_params(cfg)
    model = open_model(program_of(cfg, page_tokens=48, num_pages=8), [PREFILL], params=params)
    tokens = tokens_of(33, cfg.vocab_size)
    row = Row(
        tokens, attention=(1, 2, 3), states=tuple(range(4, 4 + model.program.num_recurrent_groups))
    )
    want, _ = oracle.forward(cfg, params, tokens)
    (got,) = run_rows(model, PREFILL, [(row, 0, len(tokens))])
    assert relative_error(got, want) <= TOLERANCE
