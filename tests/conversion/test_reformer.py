import numpy as np
import pytest
import torch

import keras_attn
from keras_attn.conversion import reformer_local_weights
from keras_attn.conversion import reformer_lsh_weights
from tests.backend import few
from tests.backend import run
from tests.backend import to_numpy

modeling = pytest.importorskip("transformers.models.reformer.modeling_reformer")

FEATURES, HEADS, SIZE, LENGTH = 10, 3, 6, 24


def reformer(kind="lsh", **options):
    """Layers of Hugging Face with random weights: the whole, and the core.

    They compute in float64, for their way to hide a position from itself, a
    score of -1e5, costs float32 two of its digits.
    """
    torch.manual_seed(3)
    config = modeling.ReformerConfig(
        attn_layers=[kind],
        hidden_size=FEATURES,
        num_attention_heads=HEADS,
        attention_head_size=SIZE,
        hidden_dropout_prob=0.0,
        local_attention_probs_dropout_prob=0.0,
        hash_seed=5,
        **options,
    )
    theirs = modeling.ReformerAttention(config).eval().double()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return theirs


def rotations(theirs, num_hashes):
    """The directions that a layer draws in each call, from its seed."""
    core = theirs.self_attention
    buckets = core.num_buckets
    columns = buckets if isinstance(buckets, int) else sum(buckets)
    torch.manual_seed(core.hash_seed)
    shape = (HEADS, SIZE, num_hashes, columns // 2)
    return torch.randn(shape, dtype=torch.float64).numpy()


def sequences():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, LENGTH, FEATURES)).astype("float32")
    padding = np.arange(LENGTH) < [[LENGTH], [LENGTH - 7]]
    padding[1, 3] = False
    return x, padding


def call(theirs, x, padding):
    """What `ReformerAttention` computes after its normalization."""
    x, padding = torch.from_numpy(x).double(), torch.from_numpy(padding)
    with torch.no_grad():
        heads = theirs.self_attention(x, attention_mask=padding).hidden_states
        return theirs.output(heads).numpy()


@pytest.mark.parametrize(
    ("num_hashes", "num_buckets", "before", "after", "causal", "padded"),
    few(
        [
            (3, [2, 4, 2], 2, 0, True, True),
            (2, [4, 2], 1, 1, False, True),
            (4, 8, 1, 0, True, False),
            (1, 6, 1, 0, False, False),
        ]
    ),
)
def test_lsh_attention_equals_hugging_face(
    num_hashes, num_buckets, before, after, causal, padded
):
    theirs = reformer(
        num_hashes=num_hashes,
        num_buckets=num_buckets,
        lsh_attn_chunk_length=4,
        lsh_num_chunks_before=before,
        lsh_num_chunks_after=after,
        is_decoder=causal,
    )
    ours = keras_attn.LSHAttention(
        HEADS,
        SIZE,
        bucket_size=4,
        num_hashes=num_hashes,
        max_num_hashes=num_hashes,
        num_buckets=num_buckets,
        chunks_before=before,
        chunks_after=after,
        wrap=True,
        prefix_consistent=False,
        use_bias=False,
    )
    ours.build((None, None, FEATURES))
    directions = rotations(theirs, num_hashes)
    ours.set_weights(
        reformer_lsh_weights(theirs.state_dict(), HEADS, directions)
    )
    x, padding = sequences()
    padding = padding if padded else np.ones_like(padding)

    def attend(x, padding):
        return ours(x, mask=padding, use_causal_mask=causal)

    actual = run(attend, x, padding)
    expected = call(theirs, x, padding)
    np.testing.assert_allclose(actual[padding], expected[padding], atol=2e-5)


def test_attention_without_an_output_projection():
    core = reformer(num_buckets=4).self_attention.state_dict()
    *_, kernel = reformer_lsh_weights(core, HEADS, rotations=np.ones(1))
    np.testing.assert_array_equal(
        kernel.reshape(HEADS * SIZE, -1), np.eye(HEADS * SIZE)
    )


def visible_chunks(chunk_length, before, after):
    """Mask of the chunks that each position sees, on a ring."""
    chunks = np.arange(LENGTH) // chunk_length
    distance = (chunks[None] - chunks[:, None]) % (chunks[-1] + 1)
    return (distance <= after) | (distance >= chunks[-1] + 1 - before)


@pytest.mark.parametrize(
    ("before", "after", "causal"), few([(1, 0, True), (1, 1, False)])
)
def test_local_attention_equals_hugging_face(before, after, causal):
    theirs = reformer(
        "local",
        local_attn_chunk_length=4,
        local_num_chunks_before=before,
        local_num_chunks_after=after,
        is_decoder=causal,
    )
    ours = keras_attn.MultiHeadAttention(HEADS, SIZE, use_bias=False)
    ours.build((None, None, FEATURES))
    ours.set_weights(reformer_local_weights(theirs.state_dict(), HEADS))
    x, padding = sequences()
    chunks = visible_chunks(4, before, after)

    def attend(x, padding):
        return ours(
            x, mask=padding, attention_mask=chunks, use_causal_mask=causal
        )

    expected = call(theirs, x, padding)
    actual = run(attend, x, padding)
    np.testing.assert_allclose(actual[padding], expected[padding], atol=2e-5)


def test_layers_of_a_whole_model():
    config = modeling.ReformerConfig(
        attn_layers=["local", "lsh"],
        vocab_size=11,
        hidden_size=FEATURES,
        num_attention_heads=2,
        attention_head_size=SIZE,
        feed_forward_size=7,
        axial_pos_embds=False,
    )
    state_dict = modeling.ReformerModel(config).state_dict()
    ours = keras_attn.LSHAttention(2, SIZE, use_bias=False)
    ours.build((None, None, FEATURES))
    before = to_numpy(ours.rotations.value)
    prefix = "encoder.layers.1.attention."
    ours.set_weights(
        reformer_lsh_weights(state_dict, 2, ours.rotations, prefix)
    )
    np.testing.assert_array_equal(to_numpy(ours.rotations.value), before)
    np.testing.assert_array_equal(
        to_numpy(ours.value_dense.kernel.value).reshape(FEATURES, -1),
        state_dict[f"{prefix}self_attention.value.weight"].T,
    )
    # each kind of layer says which it is
    with pytest.raises(ValueError, match="no weight .*query_key.weight"):
        reformer_lsh_weights(
            state_dict, 2, ours.rotations, "encoder.layers.0.attention."
        )
    with pytest.raises(ValueError, match="no weight .*query.weight"):
        reformer_local_weights(state_dict, 2, prefix)
