"""Windows, masks, batches: each against a definition written out plainly."""

from pathlib import Path

import numpy as np
import pytest
import torch

from megazero.base.errors import UserError
from megazero.data.batch import MicroBatch
from megazero.data.documents import TokenStream
from megazero.data.indexed_dataset import IndexedDataset
from megazero.data.loader import BatchLoader, validation_batches
from megazero.data.mixture import Mixture, Source
from megazero.data.sampler import window_of
from megazero.data.windows import WindowDataset
from tests.windows import open_datasets

VOCAB = 1000


def windows_of(dataset: IndexedDataset, seq_len: int, mask_eod: bool = False, vocab: int = VOCAB) -> WindowDataset:
    return WindowDataset(TokenStream(dataset), seq_len, vocab, mask_eod)


@pytest.fixture
def counting(make_dataset) -> IndexedDataset:
    """Tokens 0, 1, 2 ... 409 in documents of 10."""
    return make_dataset([list(range(d * 10, d * 10 + 10)) for d in range(41)])


def test_window_k_is_tokens_kS_to_kS_plus_S(counting):
    dataset = windows_of(counting, 8)
    assert dataset.num_windows == (410 - 1) // 8 == 51
    for k in (0, 1, 50):
        batch = dataset.micro_batch(np.array([k]), np.array([7]))
        assert batch.tokens_SB[:, 0].tolist() == list(range(8 * k, 8 * k + 8))
        assert torch.equal(batch.targets_SB, batch.tokens_SB + 1)
        assert batch.valid_SB.all() and batch.positions_SB is None and batch.documents is None
        assert batch.sample_ids_B.tolist() == [7]


def test_types_and_shapes(counting):
    batch = windows_of(counting, 8, mask_eod=True).micro_batch(np.array([4, 2, 9]), np.array([0, 1, 2]))
    assert batch.positions_SB is not None and batch.documents == ((8,), (4, 4), (8,))
    for tensor, dtype in [
        *[(batch.tokens_SB, torch.int64), (batch.targets_SB, torch.int64), (batch.valid_SB, torch.bool)],
        (batch.positions_SB, torch.int64),
    ]:
        assert tensor.shape == (8, 3) and tensor.dtype == dtype and tensor.is_contiguous()
    assert batch.sample_ids_B.dtype == torch.int64
    batch.targets_SB.zero_()
    assert batch.tokens_SB[1:].all(), "targets share no memory with tokens"


def test_mask_eod_against_the_definition(make_dataset):
    generator = np.random.default_rng(0)
    lengths = generator.integers(1, 9, 60)
    stream = [d for d, length in enumerate(lengths) for _ in range(length)]
    dataset = windows_of(make_dataset([[d] * length for d, length in enumerate(lengths)]), 16, mask_eod=True)
    for k in range(dataset.num_windows):
        batch = dataset.micro_batch(np.array([k]), np.array([k]))
        assert batch.positions_SB is not None and batch.documents is not None
        start, seen = k * 16, []
        of_token = [number for number, length in enumerate(batch.documents[0]) for _ in range(length)]
        for s in range(16):
            document = stream[start + s]
            seen += [document] if document not in seen else []
            first = max(start, stream.index(document))
            assert of_token[s] == seen.index(document)
            assert batch.positions_SB[s, 0] == start + s - first
            assert batch.valid_SB[s, 0] == (stream[start + s + 1] == document)


def test_without_mask_eod_documents_do_not_matter(counting, make_dataset):
    one = windows_of(make_dataset([list(range(410))], name="one"), 8)
    many = windows_of(counting, 8)
    for a, b in zip(validation_batches(one, 4), validation_batches(many, 4), strict=True):
        assert torch.equal(a.tokens_SB, b.tokens_SB) and torch.equal(a.valid_SB, b.valid_SB)


def rows(batches: list[MicroBatch]) -> dict[int, list[int]]:
    """sample id -> tokens."""
    return {
        int(batch.sample_ids_B[b]): batch.tokens_SB[:, b].tolist()
        for batch in batches
        for b in range(batch.tokens_SB.shape[1])
    }


def loader(dataset: WindowDataset, micro: int, rank: int = 0, num_data: int = 1, seed: int = 5) -> BatchLoader:
    mixture = Mixture([Source(None, dataset, 1, seed)])
    return BatchLoader(mixture, global_batch=12, micro_batch=micro, data_rank=rank, num_data=num_data)


@pytest.mark.parametrize(("micro", "num_data"), [(1, 1), (12, 1), (3, 2), (1, 4), (2, 3), (4, 3)])
def test_every_grid_consumes_the_same_samples(counting, micro: int, num_data: int):
    dataset = windows_of(counting, 8)
    for step in (0, 3, 1000):
        expected = {
            step * 12 + i: list(range(8 * window, 8 * window + 8))
            for i, window in enumerate(window_of(step * 12 + np.arange(12), dataset.num_windows, 5))
        }
        ranks = [loader(dataset, micro, rank, num_data) for rank in range(num_data)]
        parts = [rows(rank.step(step)) for rank in ranks]
        assert sum(map(len, parts)) == 12 and {k: v for part in parts for k, v in part.items()} == expected
        for rank in ranks:
            rank.close()


def test_order_within_a_step(counting):
    batches = loader(windows_of(counting, 8), 2, rank=1, num_data=3).step(4)
    assert [batch.sample_ids_B.tolist() for batch in batches] == [[48 + 2, 48 + 3], [48 + 8, 48 + 9]]


def test_step_is_a_pure_function_of_the_step(counting):
    """In order (prefetched), out of order (not), again, and in another loader: the same tensors."""
    dataset = windows_of(counting, 8, mask_eod=True)
    one, other = loader(dataset, 3), loader(dataset, 3)
    in_order = {step: one.step(step) for step in range(5)}
    for step in (4, 0, 0, 2, 3):
        for a, b in zip(in_order[step], other.step(step), strict=True):
            for x, y in zip(vars(a).values(), vars(b).values(), strict=True):
                assert torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y
    one.close()
    other.close()


def test_one_epoch_reads_every_window_once(counting):
    dataset = windows_of(counting, 8)
    batches = BatchLoader(Mixture([Source(None, dataset, 1, 1)]), global_batch=17, micro_batch=17)
    first_tokens = [token for step in range(3) for token in batches.step(step)[0].tokens_SB[0].tolist()]
    assert sorted(first_tokens) == list(range(0, 408, 8))
    batches.close()


def test_bad_id_names_file_document_position_id_and_vocabulary(make_dataset):
    dataset = windows_of(make_dataset([[1, 2], [3, 4, 999, 5]], np.int32), 2, vocab=999)
    assert dataset.micro_batch(np.array([0]), np.array([0])).tokens_SB.tolist() == [[1], [2]]
    with pytest.raises(UserError) as caught:
        dataset.micro_batch(np.array([1]), np.array([0]))
    message = str(caught.value)
    assert "MZ-205" in message and "set.bin: token 2 of document 1 is 999, expected 0 <= id < 999" in message


def test_negative_id(make_dataset):
    dataset = windows_of(make_dataset([[1, -7, 2]], np.int32), 2)
    with pytest.raises(UserError, match=r"MZ-205.*token 1 of document 0 is -7"):
        dataset.read(0)


def test_error_of_the_thread_surfaces_at_its_step_and_again(make_dataset):
    """Two windows, one bad: the step that meets it fails, each time it is asked for, and others still work."""
    dataset = windows_of(make_dataset([[1, 1, 1, 5000, 1]], np.int32), 2)
    order = window_of(np.arange(10), 2, 0).tolist()
    bad = next(step for step in range(1, 10) if order[step - 1 : step + 1] == [0, 1])
    batches = BatchLoader(Mixture([Source(None, dataset, 1, 0)]), global_batch=1, micro_batch=1)
    batches.step(bad - 1)
    for _ in range(2):
        with pytest.raises(UserError, match=r"MZ-205.*is 5000"):
            batches.step(bad)
    assert batches.step(bad - 1)[0].tokens_SB.tolist() == [[1], [1]]
    batches.close()


def test_validation_batches(counting):
    dataset = windows_of(counting, 8)
    batches = list(validation_batches(dataset, 4))
    assert [len(batch.sample_ids_B) for batch in batches] == [4] * 12 + [3]
    assert torch.cat([batch.sample_ids_B for batch in batches]).tolist() == list(range(51))
    assert torch.cat([batch.tokens_SB[0] for batch in batches]).tolist() == list(range(0, 408, 8))
    limited = [batch.sample_ids_B.tolist() for batch in validation_batches(dataset, 4, limit=6)]
    assert limited == [[0, 1, 2, 3], [4, 5]]
    assert len(list(validation_batches(dataset, 100, limit=1000))) == 1


@pytest.mark.parametrize("num_data", [2, 3, 5])
@pytest.mark.parametrize("limit", [None, 9, 1])
def test_validation_batches_of_all_ranks_are_those_of_one(counting, num_data: int, limit: int | None):
    """Each window counts once, and every rank has as many batches, so that none waits for another."""
    dataset = windows_of(counting, 8)
    ranks = [list(validation_batches(dataset, 4, limit, data_rank=rank, num_data=num_data)) for rank in range(num_data)]
    assert len({len(batches) for batches in ranks}) == 1
    counted = [id_ for batches in ranks for b in batches if b.valid_SB.any() for id_ in b.sample_ids_B.tolist()]
    assert sorted(counted) == list(range(51 if limit is None else limit))
    assert all(b.valid_SB.all() or not b.valid_SB.any() for batches in ranks for b in batches)


@pytest.mark.parametrize(("num_tokens", "seq_len", "num_windows"), [(9, 8, 1), (16, 8, 1), (17, 8, 2), (2, 1, 1)])
def test_number_of_windows(make_dataset, num_tokens: int, seq_len: int, num_windows: int):
    assert windows_of(make_dataset([[1] * num_tokens]), seq_len).num_windows == num_windows


@pytest.mark.parametrize("documents", [[], [[1]], [[1] * 8]])
def test_too_short_is_refused_with_numbers(make_dataset, documents):
    expected = rf"MZ-207.*seq_len \+ 1 = 9 tokens, got {sum(map(len, documents))} in {len(documents)} documents"
    with pytest.raises(UserError, match=expected):
        windows_of(make_dataset(documents), 8)


def test_open_datasets(counting, tmp_path: Path):
    prefix = tmp_path / "set"
    train, valid = open_datasets(prefix, None, 8, VOCAB, False)
    assert train.stream.num_tokens == 410 and valid is None
    train, valid = open_datasets(prefix, 0.25, 8, VOCAB, False)
    assert valid is not None and train.stream.num_tokens + valid.stream.num_tokens == 410
    seen = [set(dataset.stream.read(0, dataset.stream.num_tokens)[0]) for dataset in (train, valid)]
    assert seen[0].isdisjoint(seen[1]) and len(seen[0] | seen[1]) == 410


def test_open_datasets_without_files(tmp_path: Path):
    with pytest.raises(UserError, match=r"MZ-201.*`megazero preprocess "):
        open_datasets(tmp_path / "none", 0.1, 8, VOCAB, False)
    with pytest.raises(UserError, match=r"MZ-201.*run `make data`"):
        open_datasets("data/quickstart/none", 0.1, 8, VOCAB, False)
