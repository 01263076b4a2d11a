"""The safetensors reader and writer: agreement with the format's library, damaged files refused."""

import json
import struct
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors import numpy as released

from k3jax.weights.errors import WeightError
from k3jax.weights.safetensors_file import DTYPES, TensorFiles, read_header, write_file
from tests.tiny import DATA

GOLDEN = DATA / "k3-tiny-mxfp4" / "model-00001-of-000002.safetensors"


def write_raw(file: Path, header: object, data: bytes = b"") -> Path:
    """Write a file with a header that `write_file` would never write."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return file


def entry(begin: int, end: int, *, dtype: str = "U8", shape: list | None = None) -> dict:
    return {
        "dtype": dtype,
        "shape": [end - begin] if shape is None else shape,
        "data_offsets": [begin, end],
    }


def refusal(file: Path) -> WeightError:
    with pytest.raises(WeightError) as caught:
        read_header(file)
    assert len(caught.value.found) == 1
    assert file.name in str(caught.value)
    return caught.value


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "a.safetensors"


def test_reads_what_the_format_s_own_library_reads():
    want = released.load_file(GOLDEN)
    entries = read_header(GOLDEN)
    assert set(entries) == set(want)
    with TensorFiles() as files:
        for name, array in want.items():
            got = np.empty(array.shape, DTYPES[entries[name].dtype])
            files.read_rows(entries[name], 0, got)
            np.testing.assert_array_equal(got.view(np.uint8), array.view(np.uint8), err_msg=name)


def test_the_format_s_own_library_reads_what_is_written(file: Path):
    tensors = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b": np.arange(5, dtype=np.uint8),
        "c": np.arange(4).astype(ml_dtypes.bfloat16).reshape(2, 1, 2),
    }
    write_file(file, tensors)
    got = released.load_file(file)
    assert list(read_header(file)) == list(tensors)
    for name, array in tensors.items():
        np.testing.assert_array_equal(got[name], array)


def test_reads_a_range_of_rows(file: Path):
    array = np.arange(20, dtype=np.float32).reshape(5, 4)
    write_file(file, {"other": np.zeros(3, np.uint8), "a": array})
    rows = np.empty((2, 4), np.float32)
    with TensorFiles() as files:
        files.read_rows(read_header(file)["a"], 2, rows)
    np.testing.assert_array_equal(rows, array[2:4])


def test_kf_l01_a_cut_file_is_refused_with_its_name_and_the_missing_bytes(tmp_path: Path):
    file = tmp_path / GOLDEN.name
    file.write_bytes(GOLDEN.read_bytes()[: -(64 << 10)])
    error = refusal(file)
    assert error.found[0].kind == "truncated"
    assert error.found[0].tensor is not None
    assert "65536 bytes are missing" in str(error)


@pytest.mark.parametrize("size", [0, 5, 8, 100])
def test_a_file_cut_in_its_header_is_refused(file: Path, size: int):
    file.write_bytes(GOLDEN.read_bytes()[:size])
    error = refusal(file)
    assert error.found[0].kind == "truncated"
    assert "missing" in str(error)


def test_a_file_cut_after_its_header_was_checked_is_refused(file: Path):
    write_file(file, {"a": np.zeros((64, 8), np.float32)})
    entries = read_header(file)
    file.write_bytes(file.read_bytes()[:-16])
    with TensorFiles() as files, pytest.raises(WeightError, match="ended inside tensor a"):
        files.read_rows(entries["a"], 0, np.empty((64, 8), np.float32))


@pytest.mark.parametrize(
    ("header", "data", "words"),
    [
        pytest.param(
            {"a": entry(0, 4)}, bytes(5), "got a file of 73 bytes; expected 72", id="trailing-bytes"
        ),
        pytest.param({"a": entry(0, 4), "b": entry(6, 8)}, bytes(8), "b leaves a gap", id="gap"),
        pytest.param({"a": entry(0, 4), "b": entry(2, 6)}, bytes(6), "b overlaps", id="overlap"),
        pytest.param(
            {"a": entry(0, 4, dtype="F32", shape=[2])},
            bytes(4),
            "got 4 bytes; expected 8",
            id="size",
        ),
        pytest.param({"a": entry(0, 4, dtype="X7")}, bytes(4), "dtype of a is unknown", id="dtype"),
        pytest.param({"a": entry(0, 4, shape=[-4])}, bytes(4), "entry a: got", id="shape"),
        pytest.param({"a": {"dtype": "U8"}}, b"", "entry a: got", id="no-offsets"),
        pytest.param({"a": 3}, b"", "entry a: got", id="entry"),
        pytest.param([1], b"", "expected an object", id="list"),
        pytest.param(b"{nope", b"", "not JSON", id="json"),
        pytest.param(b"\xff\xfe\x00", b"", "not JSON", id="bytes"),
    ],
)
def test_a_header_that_breaks_the_format_is_refused(
    file: Path, header: object, data: bytes, words: str
):
    error = refusal(write_raw(file, header, data))
    assert error.found[0].kind == "header"
    assert words in str(error)


def test_an_absurd_header_length_is_refused_without_reading_it(file: Path):
    file.write_bytes(struct.pack("<Q", 1 << 60) + b"{}")
    assert refusal(file).found[0].kind == "header"


def test_a_name_that_is_there_twice_is_refused(file: Path):
    one = json.dumps(entry(0, 4))
    header = f'{{"a": {one}, "a": {one}}}'.encode()
    error = refusal(write_raw(file, header, bytes(4)))
    assert error.found[0].kind == "duplicate_tensor"
    assert error.found[0].tensor == "a"


def test_empty_tensors_are_read(file: Path):
    write_file(file, {"a": np.zeros((0, 4), np.float32), "b": np.ones(2, np.float32)})
    assert [e.shape for e in read_header(file).values()] == [(0, 4), (2,)]
