"""Open the data that a config names: what a run trains on, and what it is validated on."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from megazero.base.errors import UserError
from megazero.config.schema import Config, Source
from megazero.config.stages import stage_ends
from megazero.config.weights import whole_weights
from megazero.data import mixture
from megazero.data.mixture import Mixture, Phase, seed_of
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
    all_sources, phases = _plan(config)
    for given, weight in zip(all_sources, phases[0].weights, strict=True):
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
    found = Mixture(sources, phases)
    _refuse_repeats(config, found)
    return RunData(found, validation)


def sources_text(config: Config, found: Mixture) -> str:
    """Return the words for what a run is trained on: the path, or of each source its share and how often it comes."""
    if config.data.sources is None:
        return str(config.data.train)
    batch = config.batch.global_
    epochs = found.epochs(config.run.steps * batch)
    assert epochs is not None, "sources of a config have names"
    each = (f"{s.name} ({s.windows.stream.dataset.prefix}, {epochs[str(s.name)]:.3g} epochs)" for s in found.sources)
    shares = (
        (f"from step {phase.first // batch + 1:,} " if phase.first else "") + _shares(found, phase.weights)
        for phase in found.phases
    )
    return f"{'; '.join(shares)}; of {', '.join(each)}"


def packing_text(found: Mixture) -> Iterator[str]:
    """Yield for each source that is packed how, in words."""
    for source in found.sources:
        windows = source.windows
        if (packing := windows.packing) is not None:
            text = f"{windows.stream.num_documents:,} documents of {windows.stream.dataset.prefix} packed into "
            text += f"{packing.num_windows:,} sequences, {100 * packing.fill:.1f} % of which is text"
            cut = f"; {packing.num_cut:,} are longer than {windows.seq_len:,} tokens, and cut"
            yield text + (cut if packing.num_cut else "")


def _shares(found: Mixture, weights: Sequence[int]) -> str:
    each = zip(found.sources, weights, strict=True)
    return ", ".join(f"{source.name} {100 * weight / sum(weights):.4g} %" for source, weight in each if weight)


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


def _plan(config: Config) -> tuple[list[Source], list[Phase]]:
    """Return every source of a config and its stages, and from which sample on which weights hold.

    That of `data.train` has no name.
    """
    if config.data.sources is None:
        assert config.data.train is not None, "a resolved config"
        return [Source(path=config.data.train)], [Phase(0, (1,))]
    stages, batch = config.stages or (), config.batch.global_
    ends = stage_ends([stage.model_dump() for stage in stages], batch * config.model.seq_len)
    mixes = [stage.data.sources if stage.data else config.data.sources for stage in stages] + [config.data.sources]
    named = {source.name: source for mix in (config.data.sources, *mixes) for source in mix}
    phases: list[Phase] = []
    for first, mix in zip([0, *ends], mixes, strict=True):
        weights = whole_weights([source.weight for source in mix])
        given = {source.name: weight for source, weight in zip(mix, weights, strict=True)}
        phase = Phase(first * batch, tuple(given.get(name, 0) for name in named))
        if not phases or phases[-1].weights != phase.weights:
            phases.append(phase)
    return list(named.values()), phases


def _opened(config: Config, path: str, share: float | None) -> tuple[WindowDataset, WindowDataset | None]:
    data, model = config.data, config.model
    return open_datasets(path, share, model.seq_len, model.vocab, data.mask_eod, data.pack)


def _refuse_repeats(config: Config, found: Mixture) -> None:
    most, samples = config.data.max_epochs, config.run.steps * config.batch.global_
    for source, count in zip(found.sources, found.counts(samples), strict=True):
        epochs = count / source.windows.num_windows
        if most is not None and epochs > most:
            what = f"{config.run.steps:,} steps go through {source.name or 'it'} {epochs:.4g} times, "
            what += f"data.max_epochs is {most:g}"
            where = source.windows.stream.dataset.prefix
            raise UserError(219, what, "use more text, lower its weight or run.steps, or raise the cap", where=where)
