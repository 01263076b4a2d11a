"""MXFP4 on the host against the goldens, bit for bit."""

import numpy as np
import pytest

from k3jax.weights.mxfp4 import dequantize, quantize
from tests.tiny import DATA


@pytest.fixture(scope="module")
def golden():
    return np.load(DATA / "ops" / "mxfp4.npz")


def test_dequantize_is_exact(golden):
    np.testing.assert_array_equal(dequantize(golden["packed"], golden["scale"]), golden["dequant"])


def test_quantize_matches_the_released_encoding(golden):
    packed, scales = quantize(golden["round_trip_float"])
    np.testing.assert_array_equal(packed, golden["round_trip_packed"])
    np.testing.assert_array_equal(scales, golden["round_trip_scale"])


@pytest.mark.parametrize(
    ("byte", "values"), [(0x72, (1.0, 6.0)), (0x9A, (-1.0, -0.5))], ids=["0x72", "0x9A"]
)
def test_kf_l03_low_nibble_comes_first(byte: int, values: tuple[float, float]):
    packed = np.full((1, 16), byte, np.uint8)
    got = dequantize(packed, np.full((1, 1), 127, np.uint8))
    np.testing.assert_array_equal(got, np.tile(np.float32(values), 16)[None])


@pytest.mark.parametrize(("scale", "factor"), [(126, 0.5), (127, 1.0), (128, 2.0)])
def test_kf_l03_scales_are_powers_of_two_with_bias_127(scale: int, factor: float):
    got = dequantize(np.full((1, 16), 0x22, np.uint8), np.full((1, 1), scale, np.uint8))
    np.testing.assert_array_equal(got, np.full((1, 32), factor, np.float32))


def test_ties_go_to_the_even_code():
    values = np.zeros((1, 32), np.float32)
    values[0, :8] = [6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    packed, scales = quantize(values)
    want = np.float32([6.0, 0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0])
    np.testing.assert_array_equal(dequantize(packed, scales)[0, :8], want)


def test_a_group_of_zeros_stays_zero():
    packed, scales = quantize(np.zeros((2, 64), np.float32))
    np.testing.assert_array_equal(dequantize(packed, scales), np.zeros((2, 64), np.float32))


def test_dequantized_values_quantize_to_themselves(golden):
    finite = golden["dequant"][:2]
    np.testing.assert_array_equal(dequantize(*quantize(finite)), finite)
