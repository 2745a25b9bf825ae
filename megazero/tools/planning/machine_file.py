"""Read a machine to plan for, by name or from a file: `--hardware NAME|FILE.yaml`.

A file has the fields that `megazero doctor --write` writes. Measured rates are those that training reaches, so nothing
is subtracted. A file with data sheet figures gives in `reached` the shares of them that training reaches:

    name: my-cluster
    memory_bytes: 85899345920
    peak_flops: {bf16: 9.89e14}      # FLOP/s
    memory_bandwidth: 3.35e12        # bytes/s
    devices_per_node: 8
    in_node: {bandwidth: 4.5e11, latency: 3e-6}      # bytes/s of a device in one direction, seconds
    cross_node: {bandwidth: 5e10, latency: 1e-5}
    host_link_bandwidth: 5e10
    host_memory_bytes: 250000000000  # a device's share
    host_memory_bandwidth: 7.5e10    # a device's share; optional (the link's), as are all fields below
    disk: {bytes: 3750000000000, read: 3.1e9, write: 3.1e9}  # a device's share, by direct I/O (`megazero doctor`)
    price_per_hour: 3.0              # dollars a device
    launch: 4e-6                     # seconds of an empty kernel
    nccl_channels: 24                # of a collective in a node (NCCL_DEBUG=INFO); 0: ranks on a CPU
    reached: {matmul: 0.6, attention: 0.35, memory: 0.73, in_node: 0.75, cross_node: 0.6, beside: 1.0}
"""

from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from megazero.base.errors import UserError
from megazero.base.reading import exists, looked_up, read_file
from megazero.base.yaml_text import MOST_BYTES, parse_yaml
from megazero.plan.machines import MACHINES, Machine


def machine_of(name_or_path: str) -> Machine:
    """Return the machine with this name, or from this file.

    Raises:
        UserError: 116, no such name or file; 117, the file cannot be read or a field is wrong.
    """
    if name_or_path in MACHINES:
        return MACHINES[name_or_path]
    path = Path(name_or_path)
    if not exists(path):
        what = f"no machine or file of that name{looked_up(path)}; known machines: {', '.join(MACHINES)}"
        raise UserError(116, what, "write a file with `megazero doctor --write`", where=name_or_path)
    try:
        return TypeAdapter(Machine).validate_python(parse_yaml(read_file(path, MOST_BYTES).decode()))
    except ValidationError as error:
        fault = error.errors()[0]
        field = ".".join(map(str, fault["loc"])) or "the file"
        words = fault["msg"].lower().replace("keyword argument", "field")
        what = f"{field}: {words} ({len(error.errors())} faults)"
        raise UserError(117, what, "`megazero doctor --write FILE.yaml` writes a valid one", where=path.name) from None
    except Exception as error:  # from the system, YAML or Python: a 13th month, 5,000 digits, half a character
        what = (str(error) or type(error).__name__).splitlines()[0]
        raise UserError(117, f"not readable: {what}", "correct the file", where=path.name) from None
