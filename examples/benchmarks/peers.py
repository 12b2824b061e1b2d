"""Other implementations, as functions of arrays."""

from benchmarks.mechanisms import BUCKET_SIZE
from benchmarks.mechanisms import GLOBAL_TOKENS
from benchmarks.mechanisms import HEADS
from benchmarks.mechanisms import PROJECTED_LENGTH
from benchmarks.mechanisms import ROUNDS
from benchmarks.mechanisms import SIZE
from benchmarks.mechanisms import WIDTH
from benchmarks.mechanisms import WINDOW
from benchmarks.mechanisms import Contestant


def core(name, problem, operations):
    """An operation on heads, in the layout that the program asks for."""
    make = {
        "torch SDPA": _sdpa,
        "flex attention": _flex,
        "local-attention": _local,
        "jax.nn local window": _jax_window,
    }[name]
    shape = (problem.batch_size, HEADS, problem.length, SIZE)
    if name == "jax.nn local window":
        shape = (problem.batch_size, problem.length, HEADS, SIZE)
    arrays = [problem.draw(*shape, seed=seed) for seed in range(3)]
    return Contestant(make(problem), arrays, operations, is_traceable=False)


def _sdpa(problem):
    from torch.nn.functional import scaled_dot_product_attention

    return lambda query, key, value: scaled_dot_product_attention(
        query, key, value, is_causal=problem.causal
    )


def _flex(problem):
    import torch
    from torch.nn.attention import flex_attention as flex

    def is_near(batch, head, query, key):
        near = abs(query - key) <= WINDOW // 2
        return near & (key <= query) if problem.causal else near

    device = "cuda" if torch.cuda.is_available() else "cpu"
    mask = flex.create_block_mask(
        is_near, None, None, problem.length, problem.length, device=device
    )
    attend = torch.compile(flex.flex_attention, dynamic=False)
    return lambda query, key, value: attend(query, key, value, block_mask=mask)


def _local(problem):
    from local_attention import LocalAttention

    return LocalAttention(
        WINDOW // 2,
        causal=problem.causal,
        look_forward=0 if problem.causal else 1,
        use_rotary_pos_emb=False,
    )


def _jax_window(problem):
    import jax

    window = (WINDOW // 2, 0 if problem.causal else WINDOW // 2)
    return lambda query, key, value: jax.nn.dot_product_attention(
        query, key, value, local_window_size=window
    )


def layer(name, problem, operations):
    """A layer with projections, for sequences `(B, T, WIDTH)`."""
    import torch

    make = {
        "HF Longformer": _longformer,
        "HF Longformer, 64 global": _global_longformer,
        "LocalMHA": _local_layer,
        "HF Reformer": _reformer,
        "reformer-pytorch": _reformer_pytorch,
        "lucidrains linformer": _linformer,
        "linear-attention-transformer": _linear,
    }[name]
    x = problem.draw(problem.batch_size, problem.length, WIDTH)
    module, call = make(problem)
    module.to(x.device, x.dtype)
    output = torch.nn.Linear(WIDTH, WIDTH).to(x.device, x.dtype)
    # published without the projection of the output, which the others have
    is_bare = name.startswith("HF")
    parameters = [p for p in module.parameters() if p.requires_grad]
    if is_bare:
        parameters += list(output.parameters())

    def function(x, *_):
        attended = call(module, x)
        return output(attended) if is_bare else attended

    return Contestant(
        function, [x, *parameters], operations, is_traceable=False
    )


def _longformer(problem, count=0):
    import torch
    from transformers import LongformerConfig
    from transformers.models.longformer import modeling_longformer

    config = LongformerConfig(
        hidden_size=WIDTH,
        num_attention_heads=HEADS,
        attention_window=[WINDOW],
        attention_probs_dropout_prob=0.0,
    )
    module = modeling_longformer.LongformerSelfAttention(config, layer_id=0)
    is_global = torch.arange(problem.length).expand(problem.batch_size, -1)
    is_global = is_global < count

    def call(module, x):
        marks = is_global.to(x.device)
        return module(
            x,
            # 10,000 marks a global token, 0 any other
            attention_mask=marks.to(x.dtype) * 10_000,
            is_index_masked=marks & False,
            is_index_global_attn=marks,
            is_global_attn=count > 0,
        )[0]

    return module, call


def _global_longformer(problem):
    return _longformer(problem, GLOBAL_TOKENS)


def _local_layer(problem):
    from local_attention.transformer import LocalMHA

    module = LocalMHA(
        dim=WIDTH,
        window_size=WINDOW // 2,
        dim_head=SIZE,
        heads=HEADS,
        causal=problem.causal,
        look_forward=0 if problem.causal else 1,
        use_rotary_pos_emb=False,
    )
    return module, lambda module, x: module(x)


def _reformer(problem):
    from transformers import ReformerConfig
    from transformers.models.reformer import modeling_reformer

    config = ReformerConfig(
        hidden_size=WIDTH,
        num_attention_heads=HEADS,
        attention_head_size=SIZE,
        lsh_attn_chunk_length=BUCKET_SIZE,
        num_hashes=ROUNDS,
        num_buckets=max(2, 2 * problem.length // BUCKET_SIZE),
        is_decoder=problem.causal,
        lsh_attention_probs_dropout_prob=0.0,
        axial_pos_embds=False,
    )
    module = modeling_reformer.LSHSelfAttention(config)
    return module, lambda module, x: module(x).hidden_states


def _reformer_pytorch(problem):
    from reformer_pytorch import LSHSelfAttention

    module = LSHSelfAttention(
        WIDTH,
        heads=HEADS,
        bucket_size=BUCKET_SIZE,
        n_hashes=ROUNDS,
        causal=problem.causal,
    )
    return module, lambda module, x: module(x)


def _linformer(problem):
    from linformer import LinformerSelfAttention

    module = LinformerSelfAttention(
        WIDTH, problem.length, k=PROJECTED_LENGTH, heads=HEADS
    )
    return module, lambda module, x: module(x)


def _linear(problem):
    from linear_attention_transformer.linear_attention_transformer import (
        SelfAttention,
    )

    # causal, it leaves out the current bucket
    module = SelfAttention(
        WIDTH, HEADS, causal=problem.causal, blindspot_size=64
    )
    return module, lambda module, x: module(x)
