"""The bytes that a block keeps for its backward, in closed form, from what each of its operations saves.

T tokens of a micro-batch (sequence x micro-batch), t tensor ranks, T' = T / t under sequence parallelism and T without,
h the hidden size, kv the width of keys and of values, f that of the MLP, e bytes an element; in bytes:

    norms         4 T' h e                   input and output of both; the second input is the residual stream's sum
    attention     T (h + 2 kv) e / t         the projection
                  T h e / t                  what the heads have seen
                  T heads 4 / t              logarithms of softmax sums (8 in fp64)
    rotary        T (h + kv) e / t           rotated queries and keys
    documents     T h e / t                  what the heads have seen, in the order of documents too
    mlp           2 T f e / t                before and after gelu; gated: 3 T f e / t (gate, up, product)
    statistics    2 T' 2 4                   LayerNorm's mean and deviation (8 in fp64); RMSNorm has one number

In 16 bits with f = 4 h and t = 1 that is s b h (8 + 6 + 2 + 16) = 32 s b h. Korthikanti et al. 2022 (arXiv 2205.05198,
Table 2) count 34: two masks of dropout, a byte an element, which are not stored here, because they are computed again.
Their 5 a s^2 b for scores is what fused attention never stores. Selective recompute spares the softmax sums, and
what documents and rotary add; full recompute keeps T' h e, the input, or with Pa T' h e / t.
"""

from megazero.plan.job import Job


def kept_by_block(job: Job, recompute: str = "none") -> int:
    """Return the bytes that one block keeps of one micro-batch, with `memory.recompute` and the job's Pa."""
    shape, tokens, t, item = job.shape, job.tokens, job.tensor, job.bytes.parameter
    stream = job.local(tokens)
    if recompute == "full":
        return job.stream // (t if job.partition and not job.sequence else 1)
    heads = tokens * (shape.hidden + 2 * shape.kv_width + shape.hidden) * item // t
    statistics = 2 * stream * (2 if shape.layernorm else 1) * _wide(item)
    mlp = (3 if shape.gated else 2) * tokens * shape.ffn * item // t
    core = 0
    if recompute == "none":
        core = tokens * shape.heads // t * _wide(item)
        core += tokens * shape.hidden * item // t if job.mask_eod else 0
        if not shape.learned_positions:
            core += tokens * (shape.hidden + shape.kv_width) * item // t
    return 4 * stream * shape.hidden * item + heads + core + mlp + statistics


def logits(job: Job) -> int:
    """Return the bytes of the logits of one micro-batch, of this rank's part of the vocabulary."""
    return job.tokens * -(-job.shape.vocab // job.tensor) * job.bytes.parameter


def _wide(item: int) -> int:
    """Return the bytes of an element of a tensor that is computed in a wider type."""
    return max(item, 4)
