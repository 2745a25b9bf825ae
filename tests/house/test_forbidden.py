"""Calls that belong in one place, or nowhere.

Collectives in comm/ and launcher/ only, so that what a run sends can be counted. The process environment in two files
only (and where a peer is set up), so that a run is its config. No host wait in the step path. No global random state:
random numbers belong to names, or to a private generator. Nothing anywhere that can turn a data file into running code.
"""

import ast
from collections.abc import Callable, Iterator

import pytest

from tests.house.source import Source, dotted, findings, imports, planted, uses

COLLECTIVES = {"all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_single", "all_reduce"}
COLLECTIVES |= {"all_reduce_coalesced", "all_to_all", "all_to_all_single", "barrier", "batch_isend_irecv", "broadcast"}
COLLECTIVES |= {"gather", "irecv", "isend", "monitored_barrier", "P2POp", "recv", "reduce", "reduce_scatter"}
COLLECTIVES |= {"reduce_scatter_single", "reduce_scatter_tensor", "scatter", "send"}
GROUP_METHODS = {"allreduce", "allgather", "alltoall", "alltoall_base", "_allgather_base", "_reduce_scatter_base"}
COLLECTIVE_MODULES = ("torch.distributed._functional_collectives", "torch.distributed.nn", "torch.distributed.rpc")
OBJECT_COLLECTIVES = {"all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list"}
OBJECT_COLLECTIVES |= {"send_object_list", "recv_object_list"}
ENVIRONMENT = ("os.environ", "os.environb", "os.getenv", "os.getenvb", "os.putenv", "os.unsetenv")
ENVIRONMENT_FILES = {"megazero/launcher/environment.py", "megazero/kernels/build.py"}
ENVIRONMENT_FILES |= {"scripts/bench/data_parallel.py"}  # DeepSpeed takes its settings from nowhere else
PEERS = ("scripts/bench/torch_pipeline.py",)  # another system, whose own way it is
LESSONS = ("examples/zero_from_scratch.py",)  # shows what ranks send with torch alone, and counts it itself
PICKLES = ("megazero/library/meeting.py",)  # exceptions of ranks that it has forked itself, in files without a name
STEP_PATH = ("megazero/zero/", "megazero/extensions/", "megazero/optim/", "megazero/pipeline/", "megazero/model/")
HOST_WAITS = {"item", "tolist", "cpu", "synchronize"}
DRAWS = {"torch.manual_seed", "torch.seed", "torch.rand", "torch.randn", "torch.randint", "torch.randperm"}
DRAWS |= {"torch.bernoulli", "torch.multinomial", "torch.normal"}
CODE_LOADERS = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}
CODE_CALLS = {"eval", "exec", "torch.load", "torch.save", "yaml.load", "yaml.unsafe_load", "os.system", "os.popen"}


def collectives(source: Source) -> Iterator[str]:
    if source.path.startswith(("megazero/comm/", "megazero/launcher/", "scripts/gpu_check/echo.py", *PEERS, *LESSONS)):
        return
    for node, name in uses(source):
        module, _, last = name.rpartition(".")
        of_torch = module.startswith("torch.distributed") and last in COLLECTIVES
        if of_torch or name.startswith(COLLECTIVE_MODULES):
            yield f"{source.at(node)}: {name}"
    for node in source.nodes:
        if isinstance(node, ast.Attribute) and node.attr in GROUP_METHODS:
            yield f"{source.at(node)}: .{node.attr}"


def environment(source: Source) -> Iterator[str]:
    if source.path in ENVIRONMENT_FILES:
        return
    for node, name in uses(source):
        if name in ENVIRONMENT:
            yield f"{source.at(node)}: {name}"


def host_waits(source: Source) -> Iterator[str]:
    if not source.path.startswith(STEP_PATH):
        return
    for node in source.nodes:
        if isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else dotted(node.func)
            if called in HOST_WAITS:
                yield f"{source.at(node)}: {called}()"


def global_random_state(source: Source) -> Iterator[str]:
    for found in imports(source):
        if found.module == "random":
            yield f"{source.at(found.node)}: import random"
    for node, name in uses(source):
        if name.startswith("numpy.random."):
            yield f"{source.at(node)}: {name}"
    for node in source.nodes:
        if not (isinstance(node, ast.Call) and dotted(node.func) in DRAWS):
            continue
        if "generator" not in {keyword.arg for keyword in node.keywords}:
            yield f"{source.at(node)}: {dotted(node.func)} without a generator"


def code_from_data(source: Source) -> Iterator[str]:
    for found in imports(source):
        if found.module.split(".")[0] in CODE_LOADERS and source.path not in PICKLES:
            yield f"{source.at(found.node)}: import {found.module}"
    for node, name in uses(source):
        if name in CODE_CALLS or name.rpartition(".")[2] in OBJECT_COLLECTIVES:
            yield f"{source.at(node)}: {name}"
    for node in source.nodes:
        if isinstance(node, ast.keyword) and node.arg in ("allow_pickle", "shell"):
            if not (isinstance(node.value, ast.Constant) and node.value.value is False):
                yield f"{source.at(node.value)}: {node.arg}="
        elif isinstance(node, ast.keyword) and (node.arg, ast.unparse(node.value)) in [
            ("typ", "'unsafe'"),
            ("weights_only", "False"),
        ]:
            yield f"{source.at(node.value)}: {node.arg}={ast.unparse(node.value)}"


def test_project_is_free_of_all():
    assert findings(collectives, environment, host_waits, global_random_state, code_from_data) == []


BAD: list[tuple[Callable[[Source], Iterator[str]], str]] = [
    (collectives, "import torch.distributed as dist\ndist.all_reduce(x)"),
    (collectives, "import torch\ntorch.distributed.all_to_all_single(x, y)"),
    (collectives, "from torch import distributed\ndef f():\n    distributed.barrier()"),
    (collectives, "from torch.distributed import broadcast"),
    (collectives, "import torch.distributed._functional_collectives"),
    (collectives, "group.allreduce([x])"),
    (environment, "import os\nos.environ['A'] = 'b'"),
    (environment, "import os\nx = os.getenv('A')"),
    (environment, "from os import environ"),
    (environment, "import os as system\nsystem.environ.get('A')"),
    (host_waits, "x = loss.item()"),
    (host_waits, "import torch\ntorch.cuda.synchronize()"),
    (host_waits, "x.detach().cpu()"),
    (host_waits, "[v.sum().tolist() for v in y]"),
    (host_waits, "from torch.cuda import synchronize\nsynchronize()"),
    (global_random_state, "import random"),
    (global_random_state, "import numpy as np\nx = np.random.rand(3)"),
    (global_random_state, "import torch\ntorch.manual_seed(0)"),
    (global_random_state, "import torch\nx = torch.randn(3)"),
    (code_from_data, "import pickle"),
    (code_from_data, "def f():\n    from cloudpickle import loads"),
    (code_from_data, "import torch\ntorch.load('f')"),
    (code_from_data, "from torch import load"),
    (code_from_data, "eval('1')"),
    (code_from_data, "exec('x = 1')"),
    (code_from_data, "import yaml\nyaml.load(f)"),
    (code_from_data, "import numpy as np\nnp.load(f, allow_pickle=True)"),
    (code_from_data, "import numpy as np\nnp.load(f, allow_pickle=flag)"),
    (code_from_data, "import subprocess\nsubprocess.run('ls', shell=True)"),
    (code_from_data, "from ruamel.yaml import YAML\nYAML(typ='unsafe')"),
    (code_from_data, "import torch.distributed as dist\ndist.broadcast_object_list(x)"),
]
GOOD: list[tuple[Callable[[Source], Iterator[str]], str, str]] = [
    (collectives, "import torch.distributed as dist\ndist.all_reduce(x)", "megazero/comm/collectives.py"),
    (collectives, "from megazero.parallel import collectives\ncollectives.all_reduce(x)", "megazero/zero/unit.py"),
    (
        collectives,
        "import torch\nx = torch.gather(y, 0, z); g: torch.distributed.ProcessGroup",
        "megazero/zero/unit.py",
    ),
    (environment, "import os\nos.environ['A']", "megazero/launcher/environment.py"),
    (environment, "import os\nos.path.join(environ)", "megazero/zero/unit.py"),
    (host_waits, "x = loss.item()", "megazero/train/trainer.py"),
    (host_waits, "x = cpu(items)", "megazero/observe/metrics.py"),
    (host_waits, "for k, v in d.items():\n    x = v.item_size", "megazero/zero/unit.py"),
    (global_random_state, "import torch\nx = torch.randn(3, generator=g.manual_seed(0))", "megazero/tools/generate.py"),
    (code_from_data, "import pickle", "megazero/library/meeting.py"),
    (code_from_data, "model.eval()\nre.compile('x')\njson.load(f)\nnp.load(f, allow_pickle=False)", "scripts/x.py"),
]


@pytest.mark.parametrize(("check", "text"), BAD)
def test_planted_fault_is_found(check, text):
    assert planted(check, text)


@pytest.mark.parametrize(("check", "text", "path"), GOOD)
def test_the_like_that_is_allowed_is_not(check, text, path):
    assert planted(check, text, path) == []
