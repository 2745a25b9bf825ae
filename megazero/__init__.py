"""megazero: ZeRO-100B and Megatron-style 3D parallelism for GPT training, and ZeRO for any torch module.

`shard`, `Sharded`, `backward` and `launch` are the library (docs/library.md); `load` opens a trained model
(docs/checkpoints.md). Importing the package does not import them or torch: each name is imported at its first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

from megazero.base.version import __version__

if TYPE_CHECKING:
    from megazero.library.meeting import launch
    from megazero.library.shard import shard
    from megazero.library.sharded import Sharded, backward
    from megazero.tools.opened import load

__all__ = ["Sharded", "__version__", "backward", "launch", "load", "shard"]
_FOUND_IN = {
    "backward": "library.sharded",
    "Sharded": "library.sharded",
    "launch": "library.meeting",
    "load": "tools.opened",
    "shard": "library.shard",
}


def __getattr__(name: str) -> Any:
    if name not in _FOUND_IN:
        raise AttributeError(f"module 'megazero' has no attribute {name!r}")
    return getattr(importlib.import_module(f"megazero.{_FOUND_IN[name]}"), name)
