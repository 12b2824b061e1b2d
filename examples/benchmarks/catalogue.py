"""What can be measured, by name; nothing here needs a backend."""

import dataclasses
import importlib.util

BACKENDS = ("tensorflow", "tensorflow-graph", "jax", "torch")
STUDIES = ("core", "layer", "block", "streaming", "cbam")
PLAIN = "keras"  # what everything is compared with
LENGTHS = {
    "core": [1024, 2048, 4096, 8192],
    "layer": [1024, 2048, 4096, 8192],
    "block": [512, 2048, 8192, 16384],
    "streaming": [1024, 4096, 16384, 65536],
}

# and whether there is a causal form
MECHANISMS = {
    PLAIN: True,
    "multi_head": True,
    "linear": True,
    "linformer": False,
    "window": True,
    "longformer": True,
    "lsh": True,
    "strided": True,
    "fixed": True,
    "top_k": True,
    "synthesizer": True,
}
STREAMING = ("multi_head", "linear", "window", "longformer")
IMAGES = ("plain", "cbam")
LAYOUTS = ("channels_last", "channels_first")


@dataclasses.dataclass(frozen=True)
class Peer:
    """Another implementation of one of the mechanisms."""

    mechanism: str
    study: str
    backend: str
    package: str
    causal: bool = True  # whether it has a causal form
    backward: bool = True  # whether it has gradients on a CPU

    def is_installed(self):
        return importlib.util.find_spec(self.package) is not None


PEERS = {
    "torch SDPA": Peer("multi_head", "core", "torch", "torch"),
    "flex attention": Peer("window", "core", "torch", "torch", backward=False),
    "local-attention": Peer("window", "core", "torch", "local_attention"),
    "jax.nn local window": Peer("window", "core", "jax", "jax"),
    "HF Longformer": Peer(
        "window", "layer", "torch", "transformers", causal=False
    ),
    "LocalMHA": Peer("window", "layer", "torch", "local_attention"),
    "HF Longformer, 64 global": Peer(
        "longformer", "layer", "torch", "transformers", causal=False
    ),
    "HF Reformer": Peer("lsh", "layer", "torch", "transformers"),
    "reformer-pytorch": Peer("lsh", "layer", "torch", "reformer_pytorch"),
    "lucidrains linformer": Peer(
        "linformer", "layer", "torch", "linformer", causal=False
    ),
    "linear-attention-transformer": Peer(
        "linear", "layer", "torch", "linear_attention_transformer"
    ),
}


def is_installed(backend):
    return importlib.util.find_spec(backend.split("-")[0]) is not None


def contestants(study, backend, mechanisms, causal, backward, peers):
    """Names of what is measured side by side, plain attention first."""
    if study == "cbam":
        return [f"{kind} {layout}" for kind in IMAGES for layout in LAYOUTS]
    chosen = [name for name in MECHANISMS if name in mechanisms]
    if study == "streaming":
        return [name for name in chosen if name in STREAMING]
    chosen = [name for name in chosen if MECHANISMS[name] or not causal]
    if PLAIN not in chosen:
        chosen.insert(0, PLAIN)
    found = []
    for name in chosen:
        found.append(name)
        if peers:
            found += [
                name_of_peer
                for name_of_peer, peer in PEERS.items()
                if (peer.mechanism, peer.study, peer.backend)
                == (name, study, backend)
                and (peer.causal or not causal)
                and (peer.backward or not backward)
                and peer.is_installed()
            ]
    return found
