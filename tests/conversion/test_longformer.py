import numpy as np
import pytest
import torch

import keras_attn
from keras_attn.conversion import longformer_model_weights
from keras_attn.conversion import longformer_weights
from tests.backend import few
from tests.backend import run
from tests.backend import to_numpy

modeling = pytest.importorskip(
    "transformers.models.longformer.modeling_longformer"
)

FEATURES, HEADS = 12, 3


def longformer(window_size, cls):
    """A layer of Hugging Face with random weights, and ours with the same."""
    torch.manual_seed(window_size)
    config = modeling.LongformerConfig(
        hidden_size=FEATURES,
        num_attention_heads=HEADS,
        attention_window=[window_size],
        attention_probs_dropout_prob=0.0,
        hidden_dropout_prob=0.0,
    )
    theirs = cls(config, layer_id=0).eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    ours = keras_attn.LongformerAttention(
        HEADS, FEATURES // HEADS, window_size, max_global_tokens=5
    )
    ours.build((None, None, FEATURES))
    state_dict = {k: v.numpy() for k, v in theirs.state_dict().items()}
    ours.set_weights(longformer_weights(state_dict, HEADS))
    return theirs, ours


def call(theirs, x, padding, is_global):
    """Calls a layer as `LongformerModel` does."""
    is_global = torch.from_numpy(is_global & padding)
    is_masked = torch.from_numpy(~padding)
    attention_mask = is_global.float() * 1e4 - is_masked.float() * 1e4
    with torch.no_grad():
        outputs = theirs(
            torch.from_numpy(x),
            attention_mask=attention_mask,
            is_index_masked=is_masked,
            is_index_global_attn=is_global,
            is_global_attn=bool(is_global.any()),
        )
    return outputs[0].numpy()


# Hugging Face wants lengths that are multiples of the window, and fails at 2
@pytest.mark.parametrize(
    ("window_size", "length"), [(4, 32), (8, 32), (16, 48), (32, 32)]
)
def test_equals_hugging_face(window_size, length):
    theirs, ours = longformer(window_size, modeling.LongformerSelfAttention)
    rng = np.random.default_rng(window_size)
    x = rng.normal(size=(3, length, FEATURES)).astype("float32")
    places = np.arange(length)
    whole = np.ones((3, length), bool)
    right = places < [[length], [length - 5], [length // 2 + 1]]
    left = places >= [[0], [3], [length // 2]]
    holes = rng.random((3, length)) < 0.8
    nowhere = np.zeros((3, length), bool)
    first = whole & (places == 0)
    some = np.stack(
        [np.isin(places, at) for at in ([0, 7, 20, length - 1], [9], [])]
    )

    def attend(x, padding, is_global):
        return ours(x, mask=padding, global_mask=is_global)

    for padding, is_global in [
        (whole, nowhere),
        (right, nowhere),
        (whole, first),
        (right, first),
        (right, some),
        (left, some),
        (holes, some),
    ]:
        expected = call(theirs, x, padding, is_global)
        actual = run(attend, x, padding, is_global)
        np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-5)


def test_the_output_projection_comes_along():
    theirs, ours = longformer(8, modeling.LongformerAttention)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3, 16, FEATURES)).astype("float32")
    padding = np.arange(16) < [[16], [11], [5]]
    is_global = np.arange(16) == [[0], [9], [3]]
    attended = run(
        lambda x, padding, is_global: ours(
            x, mask=padding, global_mask=is_global
        ),
        x,
        padding,
        is_global,
    )
    with torch.no_grad():
        expected = theirs.output.LayerNorm(torch.from_numpy(attended + x))
    actual = call(theirs, x, padding, is_global)
    np.testing.assert_allclose(actual, expected.numpy(), rtol=0, atol=2e-5)


def test_a_layer_of_a_whole_model():
    _, ours = longformer(8, modeling.LongformerAttention)
    config = modeling.LongformerConfig(
        vocab_size=11,
        hidden_size=FEATURES,
        num_attention_heads=HEADS,
        num_hidden_layers=2,
        intermediate_size=7,
        max_position_embeddings=40,
        attention_window=8,
    )
    model = modeling.LongformerModel(config)
    state_dict = {k: v.numpy() for k, v in model.state_dict().items()}
    prefix = "encoder.layer.1.attention."
    ours.set_weights(longformer_weights(state_dict, HEADS, prefix))
    kernel = to_numpy(ours.key_global_dense.kernel.value).reshape(12, 12)
    expected = state_dict[f"{prefix}self.key_global.weight"].T
    np.testing.assert_array_equal(kernel, expected)
    with pytest.raises(ValueError, match="prefix='no.such.'.*encoder.layer"):
        longformer_weights(state_dict, HEADS, "no.such.")
    with pytest.raises(ValueError, match="num_heads=5"):
        longformer_weights(state_dict, 5, prefix)


def whole(cls=modeling.LongformerModel, **options):
    """A whole model with random weights."""
    torch.manual_seed(1)
    config = modeling.LongformerConfig(
        vocab_size=23,
        hidden_size=FEATURES,
        num_attention_heads=HEADS,
        num_hidden_layers=2,
        intermediate_size=7,
        max_position_embeddings=42,
        type_vocab_size=2,
        attention_window=[4, 8],
        **options,
    )
    theirs = cls(config).eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return theirs


def transformer(**options):
    def attention(depth):
        return keras_attn.LongformerAttention(
            HEADS, FEATURES // HEADS, 4 * 2**depth, max_global_tokens=4
        )

    options = {
        "vocabulary_size": 23,
        "hidden_dim": FEATURES,
        "num_layers": 2,
        "attention": attention,
        "intermediate_dim": 7,
        "max_length": 40,
        "num_token_types": 2,
        "embedding_norm": True,
        "norm": "post",
        "norm_epsilon": 1e-12,
        **options,
    }
    return keras_attn.models.Transformer(**options)


def texts(length):
    """Tokens, padding at the end, global tokens, and types."""
    rng = np.random.default_rng(0)
    padding = np.arange(length) < [[length], [length - 6], [length // 2]]
    tokens = rng.integers(2, 23, size=(3, length))
    return {
        "token_ids": np.where(padding, tokens, 1),  # 1 is that of padding
        "padding_mask": padding,
        "global_mask": np.isin(np.arange(length), [0, 5]) & padding,
        "token_types": (np.arange(length) > 8) * np.ones((3, 1), int),
    }


def call_whole(theirs, inputs):
    tensors = {k: torch.from_numpy(x) for k, x in inputs.items()}
    with torch.no_grad():
        return theirs(
            tensors["token_ids"],
            attention_mask=tensors["padding_mask"].long(),
            global_attention_mask=tensors["global_mask"].long(),
            token_type_ids=tensors["token_types"],
        )


@pytest.mark.parametrize(
    ("head", "length"), few([(None, 37), (None, 16), ("classes", 16)])
)
def test_a_whole_model_equals_hugging_face(head, length):
    inputs = texts(length)
    real = inputs["padding_mask"]
    if head is None:
        theirs, ours, prefix = whole(), transformer(), ""
        expected = call_whole(theirs, inputs).last_hidden_state.numpy()
    else:
        cls, real = modeling.LongformerForSequenceClassification, slice(None)
        theirs, prefix = whole(cls, num_labels=5), "longformer."
        ours = transformer(head="classes", num_classes=5)
        expected = call_whole(theirs, inputs).logits.numpy()
    state_dict = theirs.state_dict()
    ours.set_weights(longformer_model_weights(state_dict, ours, prefix=prefix))
    actual = run(lambda x: ours(x), inputs)
    np.testing.assert_allclose(actual[real], expected[real], rtol=0, atol=1e-4)


def test_a_pooler_comes_without_a_classifier():
    ours = transformer(head="classes", num_classes=5)
    state_dict = whole().state_dict()
    before = to_numpy(ours.classifier.kernel.value)
    ours.set_weights(longformer_model_weights(state_dict, ours))
    np.testing.assert_array_equal(
        to_numpy(ours.pooler.kernel.value), state_dict["pooler.dense.weight"].T
    )
    np.testing.assert_array_equal(
        to_numpy(ours.classifier.kernel.value), before
    )


@pytest.mark.parametrize(
    ("options", "message"),
    few(
        [
            ({"norm": "pre"}, "`norm='post'`.*norm='pre'"),
            ({"embedding_norm": False}, "`embedding_norm=True`"),
            ({"head": "tokens"}, "masked language model"),
            ({"num_layers": 1}, "finds 2 layers.*`num_layers=1`"),
            ({"num_token_types": 0}, "each token_type, which `model` has not"),
            ({"positions": None}, "each position, which `model` has not"),
            ({"max_length": 42}, r"shape \(40, 12\) .*shape \(42, 12\)"),
            ({"attention": [None, None]}, "`LongformerAttention`.*None in"),
        ]
    ),
)
def test_a_model_of_another_kind_is_refused(options, message):
    state_dict = whole().state_dict()
    with pytest.raises(ValueError, match=message):
        longformer_model_weights(state_dict, transformer(**options))


def test_a_model_of_another_class_is_refused():
    with pytest.raises(ValueError, match="`Transformer` for argument `model`"):
        longformer_model_weights({}, keras_attn.Boom(8))
