"""One call of every operation, by name: small inputs of any dtype, for tests that go through all of them."""

import torch
from torch import Tensor

from megazero.base.quantized import quantized_bytes
from megazero.kernels import reference

N, D, S, B, H = 5, 12, 4, 3, 2
KEY = 0xFEDCBA98  # its highest bit is set: a word, not a signed number


def calls(dtype: torch.dtype, seed: int = 0) -> dict[str, tuple[object, ...]]:
    """Arguments of each operation, in the schema's order."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int, of: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(of)

    wide = torch.promote_types(dtype, torch.float32)
    narrow = torch.bfloat16 if dtype.itemsize > 2 else dtype

    def statistic() -> Tensor:
        return draw(N, 1, of=wide).abs() + 0.5

    ids, positions = torch.tensor([7, 1 << 40, 3]), torch.arange(100, 100 + S)
    half = draw(S, 1, 1, D // 2)
    angles = torch.cat((half, half), -1)
    targets = torch.tensor([0, D - 1, -3, D, 4])
    codes = torch.zeros(quantized_bytes(16, 8), dtype=torch.uint8)
    reference.quantize_(codes, draw(16), 8)
    return {
        "layer_norm": (draw(N, D), draw(D), draw(D), 1e-5),
        "layer_norm_backward": (draw(N, D), draw(N, D), statistic(), statistic(), draw(D)),
        "rms_norm": (draw(N, D), draw(D), 1e-5),
        "rms_norm_backward": (draw(N, D), draw(N, D), statistic(), draw(D)),
        "add_layer_norm": (draw(N, D), draw(N, D), draw(D), draw(D), 1e-5),
        "add_layer_norm_backward": (draw(N, D), draw(N, D), draw(N, D), statistic(), statistic(), draw(D)),
        "add_rms_norm": (draw(N, D), draw(N, D), draw(D), 1e-5),
        "add_rms_norm_backward": (draw(N, D), draw(N, D), draw(N, D), statistic(), draw(D)),
        "bias_gelu": (draw(N, D), draw(D)),
        "bias_gelu_backward": (draw(N, D), draw(N, D), None),
        "swiglu": (draw(N, D), draw(N, D)),
        "swiglu_backward": (draw(N, D), draw(N, D), draw(N, D)),
        "dropout_add": (draw(S, B, D), draw(S, B, D), ids, positions, KEY, 0.25),
        "dropout_backward": (draw(S, B, D), ids, positions, KEY, 0.25),
        "rotary": (draw(S, B, 2 * H, D)[:, :, ::2], angles.cos(), angles.sin(), False),
        "cross_entropy_parts_": (draw(N, D), targets),
        "cross_entropy_backward_": (draw(N, D), draw(N, of=wide), draw(N, of=wide) + 4, targets, draw(N, of=wide)),
        "adamw_": (
            *(draw(D, of=wide), draw(D, of=wide), draw(D, of=wide), draw(D, of=wide).square(), draw(D, of=narrow)),
            *(torch.tensor(3.0), torch.tensor(2.0), torch.tensor(0.0)),
            *(1e-3, 0.9, 0.95, 1e-8, 0.1),
        ),
        "sums_of_squares": ([draw(D), draw(0), draw(S)],),
        "accumulate_": (draw(D, of=torch.float32), draw(D)),
        "cast_": (draw(D, of=narrow), draw(D)),
        "quantize_": (torch.zeros(quantized_bytes(16, 8), dtype=torch.uint8), draw(16), 8),
        "dequantize_": (draw(16), codes, 8, False),
    }
