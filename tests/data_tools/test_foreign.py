"""Token files of other projects, from bytes that are put together by hand; and what is wrong with them in one line."""

import io
import struct
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from data_tools.foreign import is_foreign, open_foreign
from megazero.base.errors import LINE_LIMIT, UserError
from megazero.data.documents import TokenStream
from megazero.data.indexed_dataset import IndexedDataset
from megazero.data.token_dataset import TokenDataset
from tests.data.test_indexed_dataset import megatron_bytes

EOD = 9
TEXT = [1, 2, 3, EOD, 4, EOD, 5, 6, 7, 8, EOD]
ENDS = [4, 6, 11]
IDS = SimpleNamespace(vocab_size=300, eod=EOD)


def packed(kind: str, values: list[int]) -> bytes:
    return struct.pack(f"<{len(values)}{kind}", *values)


def llm_c(magic: int, version: int, count: int, body: bytes) -> bytes:
    return packed("i", [magic, version, count] + [0] * 253) + body


MODES = megatron_bytes(8, [4, 2, 5], 2, [0, 1, 2, 3])
KINDS: dict[str, dict[str, bytes]] = {
    "megatron": {"x.bin": packed("H", TEXT), "x.idx": MODES},
    "with modes": {"x.bin": packed("H", TEXT), "x.idx": MODES + bytes(3)},
    "datatrove, 16 bits": {
        "x.ds": packed("H", TEXT),
        "x.ds.index": packed("Q", ENDS),
    },
    "datatrove, 32 bits": {"x.ds": packed("I", TEXT), "x.ds.index": packed("Q", ENDS)},
    "OLMo": {"x.npy": packed("H", TEXT)},
    "nanoGPT": {"x.bin": packed("H", TEXT)},
    "llm.c": {"x.bin": llm_c(20240520, 1, 11, packed("H", TEXT))},
    "llm.c, 32 bits": {"x.bin": llm_c(20240801, 7, 11, packed("I", TEXT))},
}


def written(folder: Path, files: dict[str, bytes]) -> Path:
    """Write the files; return the path that a config would name."""
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder / ("x" if "x.idx" in files else next(iter(files)))


def opened(path: Path, ids: SimpleNamespace | None = IDS) -> TokenDataset:
    return open_foreign(path, ids) if is_foreign(path) else IndexedDataset(path)


def refusal(path: Path, ids: SimpleNamespace | None = IDS) -> UserError:
    with pytest.raises(UserError) as caught:
        opened(path, ids)
    line = str(caught.value)
    assert "\n" not in line and len(line) <= LINE_LIMIT and ";" in line, "one line that says what to do"
    return caught.value


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_the_same_tokens_and_documents(tmp_path: Path, kind: str) -> None:
    dataset = opened(written(tmp_path, KINDS[kind]))
    assert (dataset.num_documents, dataset.num_tokens, dataset.mask_digest) == (3, 11, None)
    assert dataset.offsets(0, dataset.num_documents + 1).tolist() == [0, *ENDS]
    assert dataset.read(0, 11).tolist() == TEXT and dataset.read(3, 5).tolist() == TEXT[3:5]
    assert [dataset.locate(token) for token in (0, 3, 4, 10)] == [(0, 0), (0, 3), (1, 0), (2, 4)]
    stream = TokenStream(dataset)
    assert stream.parts(2, 8) == [(0, 2, 2), (1, 0, 2), (2, 0, 2)]


def test_digests_say_what_is_read_not_how_it_lies(tmp_path: Path) -> None:
    """A run goes on with the same text from files of another kind."""
    found = {
        TokenStream(opened(written(tmp_path / kind.replace(",", ""), files))).digest() for kind, files in KINDS.items()
    }
    assert len(found) == 1


def test_losses_of_datatrove_are_a_mask(tmp_path: Path) -> None:
    scored = [1, 0, 1, 1, 1, 0, 0, 1, 1, 1, 1]
    files = KINDS["datatrove, 16 bits"] | {"x.ds.loss": bytes(scored)}
    dataset = opened(written(tmp_path, files))
    assert dataset.mask_digest is not None and dataset.scored(1, 9).tolist() == [bool(s) for s in scored[1:9]]
    stream = TokenStream(dataset)
    found = stream.scored(4, 9)
    assert found.tolist() == [bool(s) for s in scored[4:9]]
    (tmp_path / "x.ds.loss").write_bytes(bytes(reversed(scored)))
    assert TokenStream(opened(tmp_path / "x.ds")).digest() != stream.digest()


def test_documents_of_several_sequences_and_none(tmp_path: Path) -> None:
    index = megatron_bytes(8, [2, 2, 2, 3, 2], 2, [0, 2, 2, 3, 5]) + bytes(5)
    dataset = opened(written(tmp_path, {"x.bin": packed("H", TEXT), "x.idx": index}))
    assert dataset.offsets(0, dataset.num_documents + 1).tolist() == [0, 4, 4, 6, 11]
    assert [dataset.locate(token)[0] for token in (3, 4, 6)] == [0, 2, 3]


@pytest.mark.parametrize("vocab", [200, 257, 65536, 65537, 2**31])
def test_the_type_of_raw_ids_follows_from_the_vocabulary(tmp_path: Path, vocab: int) -> None:
    kind = "B" if vocab <= 256 else "H" if vocab <= 65536 else "I"
    dataset = opened(written(tmp_path, {"x.npy": packed(kind, TEXT)}), SimpleNamespace(vocab_size=vocab, eod=EOD))
    assert dataset.read(0, 11).tolist() == TEXT


def test_text_behind_the_last_end_is_a_document(tmp_path: Path) -> None:
    dataset = opened(written(tmp_path, {"x.npy": packed("H", [*TEXT, 3, 3])}))
    assert dataset.offsets(0, dataset.num_documents + 1).tolist() == [0, *ENDS, 13]
    assert opened(written(tmp_path, {"x.npy": packed("H", [1, 2, 3])})).num_documents == 1
    assert opened(written(tmp_path, {"x.npy": b""})).num_documents == 0


DATATROVE = KINDS["datatrove, 16 bits"]
HALF = np.array(TEXT * 4, np.uint32)
WRONG: dict[str, tuple[dict[str, bytes], int, str]] = {
    "modes of pictures": ({"x.bin": packed("H", TEXT), "x.idx": MODES + b"\0\1\0"}, 203, "got 1 for sequence 1"),
    "modes cut off": ({"x.bin": packed("H", TEXT), "x.idx": MODES + bytes(2)}, 202, "3 more with modes, got 104"),
    "no index": ({"x.ds": DATATROVE["x.ds"]}, 201, "x.ds.index"),
    "index cut off": (DATATROVE | {"x.ds.index": packed("Q", ENDS)[:-1]}, 204, "8 bytes for each document"),
    "index of fewer": (
        DATATROVE | {"x.ds.index": packed("Q", ENDS[:-1])},
        204,
        "for each of 6 tokens, got 16 and 22 bytes",
    ),
    "index that falls": (DATATROVE | {"x.ds.index": packed("Q", [6, 4, 11])}, 204, "with rising ends"),
    "index beyond": (DATATROVE | {"x.ds.index": packed("Q", [2**63 + 4, 6, 11])}, 204, "with rising ends"),
    "tokens cut off": (DATATROVE | {"x.ds": packed("H", TEXT)[:-2]}, 204, "for each of 11 tokens, got 24 and 20 bytes"),
    "loss cut off": (DATATROVE | {"x.ds.loss": bytes(10)}, 225, "11 tokens, got 10 bytes"),
    "loss of twos": (DATATROVE | {"x.ds.loss": bytes([1] * 9 + [2, 1])}, 225, "got 11 bytes or others"),
    "half an id": ({"x.npy": packed("H", TEXT)[:-1]}, 204, "10 uint16 tokens after byte 0, got 21 bytes"),
    "wider ids": ({"x.npy": HALF.tobytes()}, 223, "ids of 16 bits for the tokenizer, got 0 for every second one"),
    "wider ids, nanoGPT": ({"x.bin": HALF.tobytes()}, 223, "they have 32"),
    "llm.c cut off": (
        {"x.bin": llm_c(20240520, 1, 12, packed("H", TEXT))},
        204,
        "12 uint16 tokens after byte 1,024, got 22 bytes",
    ),
    "llm.c of less than none": ({"x.bin": llm_c(20240520, 1, -1, packed("H", TEXT))}, 204, "-1 uint16 tokens"),
}


@pytest.mark.parametrize("fault", WRONG)
def test_what_is_wrong_is_one_line(tmp_path: Path, fault: str) -> None:
    files, code, message = WRONG[fault]
    error = refusal(written(tmp_path, files))
    assert error.code == code and message in str(error), error


def test_every_flipped_bit_of_an_index_is_refused(tmp_path: Path) -> None:
    """Of the index with modes every one; of datatrove's those that leave a rising list of as many tokens cannot be."""
    for files, name in ((KINDS["with modes"], "x.idx"), (DATATROVE, "x.ds.index")):
        path, content = written(tmp_path / name, files), files[name]
        for bit in range(8 * len(content)):
            damaged = bytearray(content)
            damaged[bit // 8] ^= 1 << bit % 8
            (tmp_path / name / name).write_bytes(damaged)
            try:
                dataset = opened(path)
                found = dataset.offsets(0, dataset.num_documents + 1).tolist()
            except UserError as error:
                assert error.code in (202, 203, 204)
            else:
                assert name == "x.ds.index" and found[-1] == 11 and found == sorted(found)


def test_without_a_tokenizer_nothing_says_what_ends_a_document(tmp_path: Path) -> None:
    for files in (KINDS["OLMo"], KINDS["nanoGPT"]):
        error = refusal(written(tmp_path, files), None)
        assert error.code == 222 and "give the tokenizer" in str(error)
    assert opened(written(tmp_path / "ds", DATATROVE), None).num_tokens == 11, "its index says it"


def test_half_of_a_pair_and_what_is_not_there(tmp_path: Path) -> None:
    prefix = written(tmp_path, KINDS["megatron"])
    error = refusal(Path(f"{prefix}.bin"))
    assert error.code == 201 and f"give the prefix {prefix}" in str(error)
    for name in ("no.npy", "no.ds", "no.bin", "no"):
        assert refusal(tmp_path / name).code == 201
    error = refusal(written(tmp_path / "large", KINDS["nanoGPT"]), SimpleNamespace(vocab_size=100_000, eod=EOD))
    assert error.code == 223 and "tokenizer of 100,000 ids" in str(error)


def test_a_prefix_may_end_like_a_kind(tmp_path: Path) -> None:
    for name in ("web.npy", "web.ds", "web.bin"):
        (tmp_path / f"{name}.bin").write_bytes(packed("H", TEXT))
        (tmp_path / f"{name}.idx").write_bytes(MODES)
        assert opened(tmp_path / name, None).num_documents == 3


def test_the_format_of_numpy_itself_is_refused(tmp_path: Path) -> None:
    stream = io.BytesIO()
    np.save(stream, np.array(TEXT, np.uint16))
    error = refusal(written(tmp_path, {"x.npy": stream.getvalue()}))
    assert error.code == 202 and "got numpy's own format; write them with ndarray.tofile" in str(error)
