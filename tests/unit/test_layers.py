"""Linear maps of a single token on a GPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.layers import linear, linear_f32


@pytest.mark.parametrize(("tokens", "computed"), [(1, 8), (2, 2), (9, 9)])
def test_a_gpu_computes_a_single_token_as_eight(tokens: int, computed: int) -> None:
    x, w = jnp.zeros((tokens, 96), jnp.bfloat16), jnp.zeros((3, 40, 96), jnp.bfloat16)
    program = jax.jit(lambda x, w: linear_f32(x, w[1]))
    lowered = program.trace(x, w).lower(lowering_platforms=("cuda",)).as_text()
    (product,) = (line for line in lowered.splitlines() if "dot_general" in line)
    assert f"-> tensor<{computed}x40xf32>" in product
    on_cpu = program.trace(x, w).lower(lowering_platforms=("cpu",)).as_text()
    assert f"tensor<{tokens}x40xf32>" in next(
        line for line in on_cpu.splitlines() if "dot_general" in line
    )


def test_padding_a_token_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.random.default_rng(0).standard_normal((3, 96), np.float32)
    w = np.random.default_rng(1).standard_normal((40, 96), np.float32)
    # Here the GPU's branch is taken on this machine.
    monkeypatch.setattr(
        jax.lax, "platform_dependent", lambda *args, default, **branches: branches["cuda"](*args)
    )
    for row in range(3):
        one = linear(jnp.asarray(x[row : row + 1]), jnp.asarray(w))
        np.testing.assert_allclose(one[0], x[row] @ w.T, rtol=1e-5, atol=1e-5)
