"""The outside oracle: logits and every gradient equal transformers' GPT-2 and Llama on random weights.

In one process, and on 2 and 4 tensor ranks with and without sequence parallelism.

transformers' Llama computes its norms and rotary angles in fp32 whatever the model's dtype. In fp32 it runs as it is;
for the fp64 comparison those two islands are widened, everything else (attention, rotation, MLP, heads) stays theirs.
"""

from dataclasses import replace
from functools import cache

import pytest
import torch
import transformers
from torch import Tensor, nn

from megazero.comm.collectives import all_reduce
from megazero.comm.grid import Axis, Grid
from megazero.kernels.select import choose
from megazero.model.parameter import declaration_of
from megazero.plan.model import Kind, Rope, Shape
from megazero.tools.certify.tolerances import difference
from tests.model.families import under_our_names
from tests.model.small import GPT, LLAMA, batch, make, step_of
from tests.ranks import run_ranks

# Against another implementation of the same arithmetic: a few roundings of each matrix product differ.
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}
ROWS = 3


def their_gpt2(shape: Shape) -> nn.Module:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=shape.vocab,
            n_positions=shape.seq_len,
            n_embd=shape.hidden,
            n_layer=shape.layers,
            n_head=shape.heads,
            n_inner=shape.ffn,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            layer_norm_epsilon=shape.norm_eps,
            tie_word_embeddings=True,
            attn_implementation="eager",
        )
    )


def theta_of(shape: Shape) -> float:
    (kind,) = shape.kinds
    assert kind.rope is not None
    return kind.rope.theta


def their_llama(shape: Shape) -> nn.Module:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=shape.vocab,
            hidden_size=shape.hidden,
            intermediate_size=shape.ffn,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads,
            max_position_embeddings=shape.seq_len,
            rms_norm_eps=shape.norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": theta_of(shape)},
            tie_word_embeddings=shape.tie_embeddings,
            attn_implementation="sdpa",  # eager would take its softmax in fp32
        )
    )


def widen(model: nn.Module) -> None:
    """Makes the fp32 islands of a Llama compute in fp64."""
    for module in model.modules():
        if type(module).__name__ == "LlamaRMSNorm":
            module.forward = lambda x, norm=module: nn.functional.rms_norm(
                x, x.shape[-1:], norm.weight, norm.variance_epsilon
            )
        if type(module).__name__ == "LlamaRotaryEmbedding":
            theta, width = module.config.rope_parameters["rope_theta"], module.inv_freq.numel() * 2
            frequencies = 1.0 / theta ** (torch.arange(0, width, 2, dtype=torch.float64) / width)

            def angles(x: torch.Tensor, position_ids: torch.Tensor, f: torch.Tensor = frequencies):
                once = position_ids[..., None].double() * f
                both = torch.cat((once, once), -1)
                return both.cos(), both.sin()

            module.forward = angles


CASES = {
    "gpt2": (GPT, their_gpt2),
    "llama": (LLAMA, their_llama),
    "llama-tied": (replace(LLAMA, tie_embeddings=True), their_llama),
    "llama-one-kv-head": (replace(LLAMA, kv_heads=1), their_llama),
    "llama-theta": (replace(LLAMA, kinds=(Kind(rope=Rope(500000.0)),), kv_heads=4), their_llama),
}


@cache
def reference(case: str, dtype: torch.dtype) -> tuple[dict[str, Tensor], Tensor, dict[str, Tensor]]:
    """transformers' weights under our names, its logits [S, B, V], and its gradients under our names."""
    shape, build = CASES[case]
    torch.manual_seed(0)
    theirs = build(shape).to(dtype)
    if dtype == torch.float64:
        widen(theirs)
    for parameter in theirs.parameters():  # their norms start at 1 and biases at 0, which would hide a mix-up
        nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.2)
    tokens_SB, targets_SB, _ = batch(shape, ROWS)
    logits = theirs(tokens_SB.T).logits
    nn.functional.cross_entropy(logits.flatten(0, 1), targets_SB.T.flatten()).backward()
    kind, named = "gpt2" if shape.learned_positions else "llama", dict(theirs.named_parameters())
    weights = under_our_names(shape, kind, {n: p.detach() for n, p in named.items()})
    gradients = under_our_names(shape, kind, {n: p.grad for n, p in named.items() if p.grad is not None})
    return weights, logits.detach().transpose(0, 1), gradients


@pytest.mark.parametrize("kernels", ["reference", "auto"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@pytest.mark.parametrize("case", CASES)
def test_logits_and_gradients_equal_transformers(case: str, dtype: torch.dtype, kernels: str) -> None:
    shape = CASES[case][0]
    weights, their_logits, gradients = reference(case, dtype)
    ours = make(shape, dtype, ops=choose(kernels, torch.device("cpu"), dtype))
    parameters = dict(ours.named_parameters())
    assert weights.keys() == parameters.keys()
    for name, parameter in parameters.items():
        parameter.data.copy_(weights[name])

    tokens_SB, targets_SB, valid_SB = batch(shape, ROWS)
    with torch.no_grad():
        logits_SBV = ours(tokens_SB, step_of(ROWS))
    assert difference(logits_SBV, their_logits) <= TOLERANCE[dtype]

    ours.losses(tokens_SB, targets_SB, valid_SB, step_of(ROWS)).mean().backward()
    assert gradients.keys() == parameters.keys()
    for name, parameter in parameters.items():
        assert parameter.grad is not None, name
        assert difference(parameter.grad, gradients[name]) <= TOLERANCE[dtype], name


def part_of(whole: Tensor, like: Tensor, tensor: Axis) -> Tensor:
    """This rank's rows of a whole tensor, zeros where they are padding."""
    rows = whole[tensor.rank * len(like) :][: len(like)]
    return torch.cat((rows, rows.new_zeros(len(like) - len(rows), *rows.shape[1:])))


def rank_against_transformers(grid: Grid, case: str, dtype: torch.dtype, sequence: bool) -> None:
    shape = CASES[case][0]
    weights, their_logits, gradients = reference(case, dtype)
    ours = make(shape, dtype, tensor=grid["tensor"], sequence=sequence)
    for name, parameter in ours.named_parameters():
        whole = weights[name]
        split = declaration_of(parameter).split
        parameter.data.copy_(part_of(whole, parameter, grid["tensor"]) if split else whole)
    tokens_SB, targets_SB, valid_SB = batch(shape, ROWS)
    offset = grid["tensor"].rank * shape.seq_len // grid["tensor"].size if sequence else 0
    now = replace(step_of(ROWS), sequence_offset=offset)
    with torch.no_grad():
        logits_SBV = ours(tokens_SB, now)
    vocab = slice(grid["tensor"].rank * logits_SBV.shape[-1], shape.vocab)
    theirs = their_logits[..., vocab][..., : logits_SBV.shape[-1]]
    assert difference(logits_SBV[..., : theirs.shape[-1]], theirs) <= TOLERANCE[dtype]

    ours.losses(tokens_SB, targets_SB, valid_SB, now).mean().backward()
    for name, parameter in ours.named_parameters():
        assert parameter.grad is not None, name
        if declaration_of(parameter).split:
            expected = part_of(gradients[name], parameter, grid["tensor"])
        else:
            expected = gradients[name]
            if sequence:
                all_reduce(parameter.grad, grid["tensor"], "tail")
        # on the scale of the whole tensor: a rank's rows of the key bias are noise
        error = (parameter.grad - expected).abs().max() / gradients[name].abs().max()
        assert error <= TOLERANCE[dtype], name


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@pytest.mark.parametrize("case", ["gpt2", "llama-theta", "llama", "llama-tied"])
def test_tensor_ranks_equal_transformers(case: str, dtype: torch.dtype, size: int, sequence: bool) -> None:
    if CASES[case][0].kv_heads % size == 0:
        reference(case, dtype)  # once, before the ranks are forked
        run_ranks(size, rank_against_transformers, case, dtype, sequence, tensor=size)


def test_a_wrong_group_order_would_be_seen() -> None:
    """The check above can fail: swapping two key-value heads' groups changes the logits."""
    model = make(LLAMA, torch.float64)
    tokens_SB, _, _ = batch(LLAMA, 1)
    with torch.no_grad():
        before = model(tokens_SB, step_of(1))
        weight = model.blocks[0].attention.qkv.weight
        rows = len(weight) // 4
        weight.data = torch.cat((weight[rows:], weight[:rows]))
        assert difference(model(tokens_SB, step_of(1)), before) > 1e-6
