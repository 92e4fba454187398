import hashlib
import json
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from kakeya.adapters.files.folder import CONFIG_FILE, WEIGHTS_FILE
from kakeya.adapters.files.packed import (
    ALIGNMENT_BYTES,
    PackedAdapter,
    Precision,
    digest,
    pack,
    quantise,
    rounded,
    unpack,
)
from kakeya.core.errors import InvalidArgument
from tests.adapters.adapter_folders import (
    bf16,
    safetensors,
    tiny_adapter,
    tiny_arrays,
    write_adapter,
)
from tests.laws import law

A, B = "model.layers.0.self_attn.q_proj.lora_a", "model.layers.0.self_attn.q_proj.lora_b"
_FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)


def small(rank: int = 2) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    return {
        A: rng.normal(size=(6, rank)).astype(np.float32),
        B: rng.normal(size=(rank, 4)).astype(np.float32),
    }


def test_an_exact_adapter_keeps_every_bit(tmp_path: Path) -> None:
    arrays = tiny_arrays(3)
    packed = pack(write_adapter(tmp_path, arrays, rank=8, scale=4.5), Precision.EXACT, base="b1")
    adapter = unpack(packed)
    assert (adapter.rank, adapter.scale, adapter.precision, adapter.base) == (8, 4.5, "exact", "b1")
    assert {t.path for t in adapter.tensors} == {name.rpartition(".")[0] for name in arrays}
    for tensor in adapter.tensors:
        a, b = tensor.floats()
        assert np.array_equal(a, arrays[f"{tensor.path}.lora_a"])
        assert np.array_equal(b, arrays[f"{tensor.path}.lora_b"])


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_an_exact_adapter_is_rounded_to_the_bytes_that_it_would_have_been_packed_to(
    dtype: str, tmp_path: Path
) -> None:
    arrays = {name: values.astype(dtype) for name, values in tiny_arrays(3).items()}
    folder = write_adapter(tmp_path, arrays, rank=8, scale=4)
    exact = pack(folder, Precision.EXACT, base="b1")
    assert rounded(exact) == pack(folder, Precision.INT8, base="b1")


def test_sixteen_bit_values_are_kept_or_widened_exactly(tmp_path: Path) -> None:
    arrays = small()
    write_adapter(tmp_path, {name: a.astype(np.float16) for name, a in arrays.items()}, rank=2)
    halves = unpack(pack(tmp_path, Precision.EXACT)).tensors[0]
    assert halves.a.dtype == np.float16
    assert np.array_equal(halves.a, arrays[A].astype(np.float16))
    (tmp_path / WEIGHTS_FILE).write_bytes(
        safetensors({name: ("BF16", bf16(array)) for name, array in arrays.items()})
    )
    brains = unpack(pack(tmp_path, Precision.EXACT)).tensors[0]
    cut = (arrays[B].view("<u4") & 0xFFFF0000).view("<f4")
    assert np.array_equal(brains.b, cut)


def test_the_same_adapter_gives_the_same_bytes_and_another_does_not(tmp_path: Path) -> None:
    packed = [pack(tiny_adapter(tmp_path / str(n), seed)) for n, seed in enumerate((1, 1, 2))]
    assert packed[0] == packed[1]
    assert digest(packed[0]) == digest(packed[1]) != digest(packed[2])


def test_arrays_lie_aligned_and_are_not_copied(tmp_path: Path) -> None:
    packed = pack(tiny_adapter(tmp_path, 1, rank=3))
    start = np.frombuffer(packed, np.uint8).ctypes.data
    for tensor in unpack(memoryview(packed)).tensors:
        for array in (tensor.a, tensor.b, tensor.a_scales, tensor.b_scales):
            assert array is not None
            assert (array.ctypes.data - start) % ALIGNMENT_BYTES == 0
            assert 0 < array.ctypes.data - start < len(packed)
            assert not array.flags.writeable


@law(1200)
@given(
    hnp.arrays(np.float32, hnp.array_shapes(min_dims=2, max_dims=2, max_side=12), elements=_FINITE)
)
def test_no_value_is_off_by_more_than_half_a_step_of_its_column(values: np.ndarray) -> None:
    quantised, scales = quantise(values)
    assert np.abs(quantised.astype(int)).max() <= 127
    exact = values.astype(np.float64)
    steps = scales.astype(np.float64)
    largest = np.abs(exact).max(axis=0)
    off = np.abs(exact - quantised * steps)
    bound = np.where(steps > 0, steps * (0.5 + 1e-4), 1.5e-36)
    assert (off <= bound).all()
    assert (steps <= largest / 127 * (1 + 1e-6)).all()


@settings(max_examples=100, deadline=None)
@given(
    hnp.arrays(np.float32, (7, 3), elements=st.floats(-8, 8, width=32)),
    hnp.arrays(np.float32, (3, 5), elements=st.floats(-8, 8, width=32)),
)
def test_what_an_adapter_adds_is_off_by_no_more_than_its_steps_allow(
    a: np.ndarray, b: np.ndarray
) -> None:
    rough = [quantised * scales.astype(np.float64) for quantised, scales in map(quantise, (a, b))]
    half_a, half_b = (quantise(m)[1].astype(np.float64) * 0.5001 + 1e-35 for m in (a, b))
    # |A'B' - AB| <= |A'-A| |B| + |A| |B'-B| + |A'-A| |B'-B|, and no step is wider than half.
    wide_a, wide_b = np.abs(a.astype(np.float64)), np.abs(b.astype(np.float64))
    off_a, off_b = np.broadcast_to(half_a, a.shape), np.broadcast_to(half_b, b.shape)
    bound = off_a @ wide_b + wide_a @ off_b + off_a @ off_b
    off = np.abs(rough[0] @ rough[1] - a.astype(np.float64) @ b.astype(np.float64))
    assert (off <= bound + 1e-9).all()


def test_int8_takes_a_third_of_what_the_file_takes(tmp_path: Path) -> None:
    folder = tiny_adapter(tmp_path, 1)
    assert len(pack(folder)) < (folder / WEIGHTS_FILE).stat().st_size * 0.45


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"fine_tune_type": "dora"}, "'dora'; only lora"),
        ({"fine_tune_type": "full"}, "'full'; only lora"),
        ({"peft_type": "LORA"}, "PEFT"),
        ({"lora_parameters": None}, "lora_parameters"),
        ({"lora_parameters": {"rank": 0, "scale": 1.0}}, "rank 0"),
        ({"lora_parameters": {"rank": True, "scale": 1.0}}, "rank True"),
        ({"lora_parameters": {"rank": 2, "scale": "1"}}, "scale '1'"),
        ({"lora_parameters": {"rank": "2", "scale": 1.0}}, "rank '2'"),
        ({"lora_parameters": {"rank": 2, "scale": 1e308}}, "scale 1e.308"),
        ({"lora_parameters": {"rank": 2, "scale": 10**400}}, "scale 1000"),
        ({"lora_parameters": {"rank": 2, "scale": float("nan")}}, "scale nan"),
        ({"notes": "x" * (1 << 20)}, "bytes; at most"),
        ({"lora_parameters": {"rank": 2, "alpha": 16}}, "scale None"),
        ({"lora_parameters": {"rank": 3, "scale": 1.0}}, r"asks for \(in, 3\)"),
    ],
)
def test_a_config_of_something_else_is_refused(
    tmp_path: Path, config: dict[str, object], words: str
) -> None:
    write_adapter(tmp_path, small(), rank=2, config=config)
    with pytest.raises(InvalidArgument, match=words):
        pack(tmp_path)


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({}, "holds no arrays"),
        ({A: np.ones((6, 2), np.float32)}, "only one of lora_a and lora_b"),
        (small() | {A.replace("lora_a", "m"): np.ones(4, np.float32)}, "DoRA"),
        (small() | {"model.norm.weight": np.ones(4, np.float32)}, r"'model\.norm\.weight'"),
        (small() | {"lora_a": np.ones((6, 2), np.float32)}, "'lora_a'"),
        (small() | {B: np.ones((3, 4), np.float32)}, r"asks for \(2, out\)"),
        (small() | {A: np.ones((8, 2, 6), np.float32)}, "two dimensions"),
        (small() | {A: np.ones((0, 2), np.float32)}, "two dimensions"),
        (small() | {A: np.full((6, 2), np.nan, np.float32)}, "no numbers"),
        (small() | {B: np.full((2, 4), np.inf, np.float32)}, "infinite"),
    ],
)
def test_arrays_that_are_no_plain_lora_are_refused(
    tmp_path: Path, arrays: dict[str, np.ndarray], words: str
) -> None:
    write_adapter(tmp_path, arrays, rank=2)
    with pytest.raises(InvalidArgument, match=words):
        pack(tmp_path)


def test_missing_files_and_broken_json_are_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"adapter_config\.json cannot be read"):
        pack(tmp_path)
    write_adapter(tmp_path, small(), rank=2)
    (tmp_path / WEIGHTS_FILE).unlink()
    with pytest.raises(InvalidArgument, match=r"adapters\.safetensors cannot be read"):
        pack(tmp_path)
    for text, words in (("[]", "not a JSON object"), ("{", "not JSON"), ("[" * 9999, "not JSON")):
        (tmp_path / CONFIG_FILE).write_text(text)
        with pytest.raises(InvalidArgument, match=words):
            pack(tmp_path)


@pytest.mark.parametrize("name", [CONFIG_FILE, WEIGHTS_FILE])
def test_what_is_no_regular_file_is_refused_without_reading_it(tmp_path: Path, name: str) -> None:
    (write_adapter(tmp_path, small(), rank=2) / name).unlink()
    os.mkfifo(tmp_path / name)  # nobody will ever write to it
    with pytest.raises(InvalidArgument, match="not a regular file"):
        pack(tmp_path)
    (tmp_path / name).unlink()
    (tmp_path / name).symlink_to("/dev/zero")
    with pytest.raises(InvalidArgument, match="not a regular file"):
        pack(tmp_path)


@pytest.mark.parametrize("name", ["a\0b", "a\ud800b"])
def test_what_cannot_be_the_name_of_a_folder_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidArgument, match="is no name of a file"):
        pack(tmp_path / name)


def test_arrays_that_share_bytes_are_refused(tmp_path: Path) -> None:
    write_adapter(tmp_path, small(), rank=2)
    whole = (tmp_path / WEIGHTS_FILE).read_bytes()
    length = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + length])
    size = header[B]["data_offsets"][1] - header[B]["data_offsets"][0]
    header[B]["data_offsets"] = [0, size]
    text = json.dumps(header).encode()
    data = len(text).to_bytes(8, "little") + text + whole[8 + length :]
    (tmp_path / WEIGHTS_FILE).write_bytes(data)
    with pytest.raises(InvalidArgument, match="share bytes"):
        pack(tmp_path)


def test_a_truncated_file_is_refused_wherever_it_ends(tmp_path: Path) -> None:
    whole = (write_adapter(tmp_path, small(), rank=2) / WEIGHTS_FILE).read_bytes()
    for length in range(len(whole)):
        (tmp_path / WEIGHTS_FILE).write_bytes(whole[:length])
        with pytest.raises(InvalidArgument, match="damaged or not a safetensors"):
            pack(tmp_path)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data())
def test_a_file_with_a_wrong_header_ends_in_a_sentence(tmp_path: Path, data: st.DataObject) -> None:
    whole = (write_adapter(tmp_path, small(), rank=2) / WEIGHTS_FILE).read_bytes()
    header_bytes = 8 + int.from_bytes(whole[:8], "little")
    at = data.draw(st.integers(0, header_bytes - 1))
    changed = whole[:at] + bytes([data.draw(st.integers(0, 255))]) + whole[at + 1 :]
    (tmp_path / WEIGHTS_FILE).write_bytes(changed)
    try:
        adapter = unpack(pack(tmp_path))
    except InvalidArgument:
        return
    assert adapter.rank == 2


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data())
def test_damaged_packed_bytes_are_never_read(tmp_path: Path, data: st.DataObject) -> None:
    packed = pack(write_adapter(tmp_path, small(), rank=2))
    at = data.draw(st.integers(0, len(packed) - 1))
    changed = bytearray(packed)
    changed[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(InvalidArgument, match="packed adapter"):
        unpack(bytes(changed))
    with pytest.raises(InvalidArgument, match="packed adapter"):
        unpack(packed[:at])


def test_trusted_bytes_are_read_without_the_checksum_but_not_without_looking(
    tmp_path: Path,
) -> None:
    packed = pack(write_adapter(tmp_path, small(), rank=2))
    changed = bytearray(packed)
    changed[-ALIGNMENT_BYTES * 2] ^= 1
    assert isinstance(unpack(bytes(changed), is_trusted=True), PackedAdapter)
    header = json.dumps({"rank": 2, "tensors": [{"path": "x", "a": [0, "f32", [9**9, 2]]}]})
    forged = packed[:64] + header.encode() + packed[64 + len(header) :]
    with pytest.raises(InvalidArgument, match="damaged header"):
        unpack(forged, is_trusted=True)


def test_scales_that_are_no_numbers_are_refused_where_bytes_are_first_read(tmp_path: Path) -> None:
    packed = bytearray(pack(write_adapter(tmp_path, small(), rank=2)))
    start = 64 + int.from_bytes(packed[16:24], "little")
    entry = json.loads(packed[64:start].rstrip(b"\0"))["tensors"][0]
    at = start + entry["b_scales"][0]
    packed[at : at + 4] = np.float32(np.nan).tobytes()
    packed[24:56] = hashlib.sha256(packed[:24] + packed[56:]).digest()
    with pytest.raises(InvalidArgument, match=f"{entry['path']} has scales that are no numbers"):
        unpack(bytes(packed))


def test_adapters_with_one_header_keep_their_own_values(tmp_path: Path) -> None:
    arrays = small()
    first = pack(write_adapter(tmp_path / "a", arrays, rank=2))
    second = pack(write_adapter(tmp_path / "b", {n: -2 * v for n, v in arrays.items()}, rank=2))
    for one, other in zip(unpack(first).tensors, unpack(second).tensors, strict=True):
        for ours, theirs in zip(one.floats(), other.floats(), strict=True):
            assert np.array_equal(-2 * ours, theirs)
