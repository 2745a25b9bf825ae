"""Open the data that a config names: for training and for validation."""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import NamedTuple

import xxhash

from megazero.base.errors import UserError
from megazero.config.schema import Config
from megazero.config.sections import Source
from megazero.config.stages import Course
from megazero.config.weights import whole_weights
from megazero.data import mixture
from megazero.data.joined import open_files
from megazero.data.loader import epochs_of
from megazero.data.mixture import Mixture, Phase, seed_of
from megazero.data.overlap import shared_document
from megazero.data.windows import WindowDataset, cut_windows


class RunData(NamedTuple):
    """The data of a run.

    Attributes:
        course: the course of the run.
        mixtures: sequence length -> training data, for all sample ids of the run and of a longer run.
        length: the sequence length of the current part.
        validation: samples of that length by the name of a set; "" is the set of `data.valid`.
    """

    course: Course
    mixtures: dict[int, Mixture]
    length: int
    validation: dict[str, WindowDataset]

    @property
    def mixture(self) -> Mixture:
        """Return the training data of the current part."""
        return self.mixtures[self.length]

    @property
    def others(self) -> list[Mixture]:
        """Return the training data with other lengths."""
        return [each for length, each in self.mixtures.items() if length != self.length]

    def digest(self) -> str:
        """Return a digest of what the run reads in which order; it does not depend on the number of steps."""
        used = _lengths(self.course)
        each = [self.mixtures[length].digest() for length in used]
        if len(each) == 1:
            return each[0]
        told = "\n".join(f"{length}: {digest}" for length, digest in zip(used, each, strict=True))
        return f"windows of {', '.join(map(str, used))} tokens, xxh3 {xxhash.xxh3_64_hexdigest(told.encode())}"


def open_data(config: Config, course: Course | None = None) -> RunData:
    """Open all data of a run.

    If `data.valid` is a share, that share of each source's documents is held out; each source with a name then has a
    validation set of that name.

    Args:
        config: the current config: of a part of the course, or of the whole run.
        course: the course of the run; None: that of the config.

    Raises:
        UserError: 201 to 204, 225, files are missing or damaged; 228, a folder has no complete shard, or mixed types;
            206, a split has an empty side; 207, too few tokens.
    """
    course, length, data = course or Course(config), config.model.seq_len, config.data
    share = data.valid if isinstance(data.valid, float) else None
    cut = partial(cut_windows, vocab=config.model.vocab, mask_eod=data.mask_eod, pack=data.pack)
    validation: dict[str, WindowDataset] = {}
    mixtures: dict[int, Mixture] = {}
    files = {given.name: open_files(given.path) for given in sources_of(course)}
    for each in dict.fromkeys([*_lengths(course), length]):
        phases, sources = list(_phases(course, each)), []
        for given, weight in zip(sources_of(course), phases[0].weights, strict=True):
            windows, held_out = cut(files[given.name], share, each)
            sources.append(mixture.Source(given.name, windows, weight, _order(course, given.name, each)))
            if held_out is not None and each == length:
                validation[given.name or ""] = held_out
        mixtures[each] = Mixture(sources, phases)
    paths = {"": data.valid} if isinstance(data.valid, str) else {}
    paths |= {str(other.name): other.path for other in data.validation or ()}
    validation |= {name: cut(open_files(path), None, length)[0] for name, path in paths.items()}
    return RunData(course, mixtures, length, validation)


def _lengths(course: Course) -> list[int]:
    """Return the window lengths of a run, in the order of its parts, and of the part after its last step."""
    return list(dict.fromkeys(part.seq_len for part in (*course.parts, *course.after)))


def sources_text(data: RunData) -> str:
    """Describe what a run is trained on: the path, or the shares of its sources and the epochs over each."""
    course = data.course
    if course.config.data.sources is None:
        return str(course.config.data.train)
    sources = data.mixture.sources
    epochs = epochs_of(list(data.mixtures.values()), course.samples(course.config.run.steps)) or {}
    each = (f"{s.name} ({s.windows.stream.dataset.prefix}, {epochs[str(s.name)]:.3g} epochs)" for s in sources)
    grouped = groupby(course.parts, lambda part: _shares(part.config.data.sources or ()))
    begun = ((text, part.first) for text, (part, *_) in grouped if text)
    shares = (f"from step {first + 1:,} {text}" if first else text for text, first in begun)
    return f"{'; '.join(shares)}; of {', '.join(each)}"


def packing_text(data: RunData) -> Iterator[str]:
    """Yield a description of the packing of each packed source."""
    for source in data.mixture.sources:
        windows = source.windows
        if (packing := windows.packing) is not None:
            text = f"{windows.stream.num_documents:,} documents of {windows.stream.dataset.prefix} packed into "
            text += f"{packing.num_windows:,} sequences, {100 * packing.fill:.1f} % of which is text"
            cut = f"; {packing.num_cut:,} are cut because they are longer than {windows.seq_len:,} tokens"
            yield text + (cut if packing.num_cut else "")


def _shares(sources: Sequence[Source]) -> str:
    whole = sum(source.weight for source in sources)
    return ", ".join(f"{source.name} {100 * source.weight / whole:.4g} %" for source in sources)


def refuse_overlap(config: Config, data: RunData) -> None:
    """Refuse a set of `data.validation` with a document that is trained on.

    Raises:
        UserError: 220, with the first such document.
    """
    for given in (str(each.name) for each in config.data.validation or ()):
        stream = data.validation[given].stream
        for source in data.mixture.sources:
            trained = source.windows.stream
            if (shared := shared_document(trained, stream)) is not None:
                what = f"document {shared[1]:,} of validation set {given} is trained on: it is document "
                what += f"{shared[0]:,} of {trained.dataset.prefix}"
                do = "remove it from one of them, or hold out documents of the sources with data.valid=SHARE"
                raise UserError(220, what, do, where=stream.dataset.prefix)


def sources_of(course: Course) -> list[Source]:
    """Return every source of a config and its stages; the source of `data.train` has no name."""
    named = course.sources()
    if named is not None:
        return named
    assert course.config.data.train is not None, "a resolved config"
    return [Source(path=course.config.data.train).model_copy(update={"name": None})]


def _phases(course: Course, length: int) -> Iterator[Phase]:
    """Yield the phases of the mixture of one window length; weights are 0 while other lengths are read."""
    names, last = [source.name for source in sources_of(course)], None
    for part in (*course.parts, *course.after):
        phase = Phase(part.samples, tuple(0 for _ in names))
        if part.seq_len == length:
            sources = part.config.data.sources
            weights = whole_weights([source.weight for source in sources]) if sources else [1]
            given = dict(zip([source.name for source in sources] if sources else [None], weights, strict=True))
            gone = tuple(weight for name, weight in given.items() if name not in names)
            phase = Phase(part.samples, tuple(given.get(name, 0) for name in names), gone)
        if last is None or (last.weights, last.gone) != (phase.weights, phase.gone):
            yield (last := phase)


def _order(course: Course, name: str | None, length: int) -> int:
    """Return the seed of the order of a source's windows; lengths other than the run's first have their own seeds."""
    seed = course.config.run.seed
    if length != course.parts[0].seq_len:
        return seed_of(seed, f"{name or ''}, windows of {length} tokens")
    return seed if name is None else seed_of(seed, name)


def refuse_repeats(data: RunData) -> None:
    """Refuse sources that would be read for too many epochs. Raises UserError 219."""
    course, all_lengths = data.course, list(data.mixtures.values())
    most, steps = course.config.data.max_epochs, course.config.run.steps
    samples = course.samples(steps)
    for place, source in enumerate(all_lengths[0].sources):
        epochs = sum(each.counts(samples)[place] / each.sources[place].windows.num_windows for each in all_lengths)
        if most is not None and epochs > most:
            what = f"{steps:,} steps read {source.name or 'it'} {epochs:.4g} times, "
            what += f"data.max_epochs is {most:g}"
            where = source.windows.stream.dataset.prefix
            raise UserError(219, what, "use more text, lower its weight or run.steps, or raise max_epochs", where=where)
