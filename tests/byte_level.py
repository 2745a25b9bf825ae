"""Train small byte-level BPE tokenizers, as GPT-2's is made."""

from collections.abc import Iterable, Sequence

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers


def train(tokenizer: Tokenizer, texts: Iterable[str], size: int, special: Sequence[str] = ()) -> None:
    """Train a byte-level tokenizer with `size` ids: the special tokens, the bytes, and merges."""
    options = {"special_tokens": [*special], "initial_alphabet": pre_tokenizers.ByteLevel.alphabet()}
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=size, show_progress=False, **options))


def byte_level_bpe(
    texts: Iterable[str], size: int, special: Sequence[str] = (), normalizer: object = None
) -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    if normalizer is not None:
        made.normalizer = normalizer
    train(made, texts, size, special)
    return made
