"""Write what a rank returns as JSON, and read it again: numbers, text, tensors, lists and dictionaries."""

from typing import Any

import torch
from torch import Tensor

from megazero.base.errors import UserError

_BYTES = "bytes of a tensor"  # the key that tells an encoded tensor from a dictionary


def encoded(value: Any) -> Any:
    """Return a value in JSON's types. Raises UserError 510: it has others than `launch` takes."""
    if isinstance(value, Tensor):
        flat = value.detach().cpu().contiguous()
        data = flat.view(-1).view(torch.uint8).numpy().tobytes().hex()
        return {_BYTES: data, "dtype": str(flat.dtype).removeprefix("torch."), "shape": list(flat.shape)}
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: encoded(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [encoded(one) for one in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    do = "return numbers, text, tensors, lists and dictionaries with text for keys"
    raise UserError(510, f"rank 0 returned a {type(value).__name__}", do, where="launch")


def decoded(value: Any) -> Any:
    """Return a value from JSON's types; tuples have become lists."""
    if isinstance(value, list):
        return [decoded(one) for one in value]
    if not isinstance(value, dict):
        return value
    if _BYTES not in value:
        return {key: decoded(one) for key, one in value.items()}
    dtype = getattr(torch, value["dtype"])
    if not (data := bytearray.fromhex(value[_BYTES])):
        return torch.empty(value["shape"], dtype=dtype)
    return torch.frombuffer(data, dtype=torch.uint8).view(dtype).view(value["shape"])
