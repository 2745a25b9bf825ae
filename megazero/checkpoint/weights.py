"""The final weights of a run: one safetensors file of full logical tensors, under the model's parameter names.

It is written beside its place and moved there when it is complete and on disk, so a file that exists is whole.
"""

import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from megazero.errors import UserError
from megazero.files import flush_file, flush_folder
from megazero.parallel.collectives import all_gather, all_reduce
from megazero.parallel.grid import Axis

FILE_NAME = "model.safetensors"


def whole_weights(parts: Iterable[tuple[str, Tensor, int | None]], tensor: Axis) -> Iterator[tuple[str, Tensor]]:
    """The whole logical tensors of what this rank has parts of; every rank of the tensor axis goes through all.

    Args:
        parts: (name, this rank's rows, rows of the whole without padding), the last None where every rank has it all.
            Rows need to be there only until the next ones are asked for, and so are the results.
    """
    for name, part, rows in parts:
        yield name, part if rows is None else all_gather(part.contiguous(), tensor, "save")[:rows]


def bring_together(
    own: Iterable[tuple[str, Tensor]], shapes: Sequence[Mapping[str, torch.Size]], pipeline: Axis, like: Tensor
) -> dict[str, Tensor]:
    """All ranks' tensors on the first rank of the pipeline; nothing on the others, which hold one at a time.

    Args:
        own: this rank's.
        shapes: of each rank of the pipeline the tensors that it contributes, in the order of its `own`.
        like: of the dtype and device of all.
    """
    whole: dict[str, Tensor] = {}
    mine = (named for named in own if named[0] in shapes[pipeline.rank])
    for rank, of_rank in enumerate(shapes):
        for name, shape in of_rank.items():
            tensor = like.new_zeros(shape)
            if rank == pipeline.rank:
                found, values = next(mine)
                assert found == name, f"{found} comes where {name} should"
                tensor.copy_(values)
            # As bytes: a sum with zeros that keeps every bit, that of a negative zero too.
            all_reduce(tensor.view(-1).view(torch.uint8), pipeline, "save")
            if pipeline.rank == 0:
                whole[name] = tensor
    for _ in mine:  # what is another rank's to contribute; those that share it go through it too
        pass
    return whole


def save_weights(folder: Path, tensors: Mapping[str, Tensor], step: int) -> Path:
    """Writes `tensors` to `folder`/model.safetensors; the folder appears with the complete file in it.

    Raises:
        UserError: 302, a value is not finite; 403, the disk is full or not writable; nothing is left behind.
    """
    if bad := [name for name, tensor in tensors.items() if not torch.isfinite(tensor).all()]:
        what = f"{len(bad)} of {len(tensors)} weights are not finite after the last update, first {bad[0]}"
        raise UserError(302, what, "lower optimizer.lr and train again", where=folder, step=step)
    staging = None
    try:
        staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        staging.chmod(0o755)  # mkdtemp's folders are private
        whole = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
        # One entry: the library writes several in an order that changes from call to call, and equal weights are to be
        # equal files.
        save_file(whole, staging / FILE_NAME, metadata={"megazero": f"weights 1, step {step}"})
        flush_file(staging / FILE_NAME)
        flush_folder(staging)
        staging.rename(folder)
        flush_folder(folder.parent)
    except (OSError, SafetensorError) as error:
        raise UserError(403, f"weights not saved: {error}", "free space there and run again", where=folder) from None
    finally:
        if staging is not None:
            shutil.rmtree(staging, ignore_errors=True)
    return folder / FILE_NAME


def load_weights(path: Path, parameters: Mapping[str, nn.Parameter], dtype: torch.dtype) -> None:
    """Gives the (meta) parameters the memory and values of the file's tensors, cast to `dtype`.

    Raises:
        UserError: 404, the file cannot be read, or its tensors are not the model's.
    """
    try:
        with safe_open(path, framework="pt") as file:
            names = set(file.keys())
            if missing := sorted(parameters.keys() ^ names):
                what = f"{len(missing)} tensors differ from the model's, first {missing[0]}"
                raise UserError(404, what, "is this the run's own config.yaml?", where=path)
            for name, parameter in parameters.items():
                tensor = file.get_tensor(name)
                if tensor.shape != parameter.shape:
                    what = f"{name}: expected {tuple(parameter.shape)}, got {tuple(tensor.shape)}"
                    raise UserError(404, what, "is this the run's own config.yaml?", where=path)
                torch.utils.swap_tensors(parameter, nn.Parameter(tensor.to(dtype)))
    except (OSError, SafetensorError) as error:
        raise UserError(404, f"cannot be read: {error}", "train again or use another run", where=path) from None
