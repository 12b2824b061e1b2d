"""How the weights of the authors' CBAM lie in ours: plain transpositions."""


def convolution(data, name):
    return [data[f"weight.{name}.weight"].transpose(2, 3, 1, 0)]


def normalization(data, name):
    parts = ("weight", "bias", "running_mean", "running_var")
    return [data[f"weight.{name}.{part}"] for part in parts]


def channel_attention(data, prefix=""):
    names = (f"weight.{prefix}mlp.{layer}" for layer in (1, 3))
    return [
        array
        for name in names
        for array in (data[f"{name}.weight"].T, data[f"{name}.bias"])
    ]


def spatial_attention(data, prefix=""):
    name = f"{prefix}spatial"
    return convolution(data, f"{name}.conv") + normalization(data, f"{name}.bn")


def cbam(data, prefix=""):
    return channel_attention(data, f"{prefix}ChannelGate.") + spatial_attention(
        data, f"{prefix}SpatialGate."
    )
