"""Open the data that a config names: what a run trains on, and what it is validated on."""

from collections.abc import Sequence
from typing import NamedTuple

from megazero.base.errors import UserError
from megazero.config.schema import Config, Source
from megazero.config.weights import whole_weights
from megazero.data import mixture
from megazero.data.mixture import Mixture, seed_of
from megazero.data.overlap import shared_document
from megazero.data.windows import WindowDataset, open_datasets


class RunData(NamedTuple):
    """The data of a run.

    Attributes:
        mixture: to train on.
        validation: windows by the name of a set; "" is that of `data.valid`.
    """

    mixture: Mixture
    validation: dict[str, WindowDataset]


def open_data(config: Config) -> RunData:
    """Open all data of a run.

    A share in `data.valid` is held out of each source's documents; of sources with names each is a validation set of
    that name.

    Raises:
        UserError: 201 to 204 files missing or damaged, 206 a split with an empty side, 207 too few tokens, 219 sources
            that would be gone through too often.
    """
    data, seed = config.data, config.run.seed
    share = data.valid if isinstance(data.valid, float) else None
    validation: dict[str, WindowDataset] = {}
    sources = []
    for given, weight in zip(*_sources(config), strict=True):
        windows, held_out = _opened(config, given.path, share)
        order = seed if given.name is None else seed_of(seed, given.name)
        sources.append(mixture.Source(given.name, windows, weight, order))
        if held_out is not None:
            validation[given.name or ""] = held_out
    if isinstance(data.valid, str):
        validation[""], _ = _opened(config, data.valid, None)
    for other in data.validation or ():
        assert other.name is not None, "a resolved config"
        validation[other.name], _ = _opened(config, other.path, None)
    found = Mixture(sources)
    _refuse_repeats(config, found)
    return RunData(found, validation)


def sources_text(config: Config, found: Mixture) -> str:
    """Return the words for what a run is trained on: the path, or of each source its share and how often it comes."""
    if config.data.sources is None:
        return str(config.data.train)
    samples = config.run.steps * config.batch.global_
    epochs, whole = found.epochs(samples), sum(source.weight for source in found.sources)
    assert epochs is not None, "sources of a config have names"
    each = (
        f"{s.name} {100 * s.weight / whole:.4g} % ({given.path}, {epochs[str(s.name)]:.3g} epochs)"
        for s, given in zip(found.sources, config.data.sources, strict=True)
    )
    return "of " + ", ".join(each)


def refuse_overlap(config: Config, data: RunData) -> None:
    """Refuse a set of `data.validation` that has a document which is trained on.

    Raises:
        UserError: 220, with the first that was found.
    """
    for given in (str(each.name) for each in config.data.validation or ()):
        stream = data.validation[given].stream
        for source in data.mixture.sources:
            trained = source.windows.stream
            if (shared := shared_document(trained, stream)) is not None:
                what = f"document {shared.validation:,} of validation set {given} is trained on: it is document "
                what += f"{shared.training:,} of {trained.dataset.prefix}"
                do = "take it out of one of them, or hold out documents of the sources by data.valid=SHARE"
                raise UserError(220, what, do, where=stream.dataset.prefix)


def _sources(config: Config) -> tuple[Sequence[Source], list[int]]:
    """Return the sources of a config with their whole weights; that of `data.train` has no name."""
    if config.data.sources is not None:
        return config.data.sources, whole_weights([source.weight for source in config.data.sources])
    assert config.data.train is not None, "a resolved config"
    return [Source(path=config.data.train)], [1]


def _opened(config: Config, path: str, share: float | None) -> tuple[WindowDataset, WindowDataset | None]:
    return open_datasets(path, share, config.model.seq_len, config.model.vocab, config.data.mask_eod)


def _refuse_repeats(config: Config, found: Mixture) -> None:
    most, samples = config.data.max_epochs, config.run.steps * config.batch.global_
    for source, count in zip(found.sources, found.counts(samples), strict=True):
        epochs = count / source.windows.num_windows
        if most is not None and epochs > most:
            what = f"{config.run.steps:,} steps go through {source.name or 'it'} {epochs:.4g} times, "
            what += f"data.max_epochs is {most:g}"
            where = source.windows.stream.dataset.prefix
            raise UserError(219, what, "use more text, lower its weight or run.steps, or raise the cap", where=where)
