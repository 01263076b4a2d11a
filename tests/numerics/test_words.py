"""Numbers as 16-bit words: layout and exact round trip."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.words import from_words, to_words, words_per_number
from tests.numerics.support import unchecked_annotations


def test_every_bfloat16_pattern_round_trips():
    words = np.arange(1 << 16, dtype=np.uint16).reshape(256, 256)
    numbers = from_words(jnp.asarray(words), jnp.bfloat16)
    assert numbers.dtype == jnp.bfloat16
    np.testing.assert_array_equal(to_words(numbers, jnp.bfloat16), words)


def test_float32_patterns_round_trip_with_nan_payloads():
    bits = np.random.default_rng(0).integers(0, 1 << 32, (5, 33), dtype=np.uint32)
    bits[0, :4] = [0x7F800001, 0xFFC12345, 0x80000000, 0x00000001]  # two NaNs, -0, a subnormal
    numbers = jnp.asarray(bits).view(jnp.float32)
    words = to_words(numbers, jnp.float32)
    assert words.shape == (5, 66)
    np.testing.assert_array_equal(from_words(words, jnp.float32).view(jnp.uint32), bits)


def test_float32_words_are_a_high_plane_then_a_low_plane():
    numbers = jnp.asarray([0x3F801234, 0xC0005678], jnp.uint32).view(jnp.float32)
    assert to_words(numbers, jnp.float32).tolist() == [0x3F80, 0xC000, 0x1234, 0x5678]


def test_narrowing_rounds_to_nearest_even():
    numbers = jnp.asarray([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20], jnp.float32)
    assert to_words(numbers, jnp.bfloat16).tolist() == [0x3F80, 0x3F82, 0x3F81]


def test_other_dtypes_and_odd_planes_are_refused():
    with pytest.raises(TypeError, match="got float16; expected bfloat16 or float32"):
        words_per_number(jnp.float16)
    with unchecked_annotations(), pytest.raises(ValueError, match="got 3; expected an even number"):
        from_words(jnp.zeros((2, 3), jnp.uint16), jnp.float32)
