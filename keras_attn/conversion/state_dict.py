"""What the converters share: weights by their names, in PyTorch's layouts."""

import numpy as np
from keras import ops


class StateDict:
    """The weights of an original by their names.

    Args:
        owner: Name of the converter, to name in errors.
        state_dict: Mapping of names to NumPy arrays, or to what
            `numpy.asarray` takes.
        prefix: What the names begin with.
    """

    def __init__(self, owner, state_dict, prefix=""):
        self.owner = owner
        self.arrays = state_dict
        self.prefix = prefix

    def __contains__(self, name):
        return self.prefix + name in self.arrays

    def __getitem__(self, name):
        name = self.prefix + name
        if name not in self.arrays:
            raise self.missing(name)
        return np.asarray(self.arrays[name])

    def missing(self, *names):
        """The error that none of `names` is there, and what is instead."""
        last = names[0].split(".")[-2:]
        found = [name for name in self.arrays if name.split(".")[-2:] == last]
        wanted = " or ".join(repr(name) for name in names)
        return ValueError(
            f"`{self.owner}` finds no weight {wanted}. Received: "
            f"prefix={self.prefix!r}, and of such names {found}"
        )

    def inside(self, part, name):
        """The weights of a module that stands alone, or is `part` of another.

        Args:
            part: Prefix that the names have if it is.
            name: Name of a weight that the module has.
        """
        inner = StateDict(self.owner, self.arrays, self.prefix + part)
        if name in inner:
            return inner
        if name in self:
            return self
        raise self.missing(inner.prefix + name, self.prefix + name)

    def heads(self, name, num_heads):
        """Kernel `(F, N, H)` and bias `(N, H)` of a projection into heads."""
        kernel = self[f"{name}.weight"].T  # from (out, in)
        bias = self.get(f"{name}.bias")
        return self.split_heads(kernel, bias, num_heads)

    def split_heads(self, kernel, bias, num_heads):
        """Splits the features of a kernel and of a bias into heads."""
        features = kernel.shape[1]
        if features % num_heads:
            raise ValueError(
                f"`{self.owner}` needs a `num_heads` that divides the "
                f"{features} features. Received: num_heads={num_heads}"
            )
        shape = (num_heads, features // num_heads)
        kernel = kernel.reshape(len(kernel), *shape)
        return [kernel] if bias is None else [kernel, bias.reshape(shape)]

    def output(self, name, num_heads):
        """Kernel `(N, V, E)` and bias `(E,)` of a projection out of heads."""
        kernel = self[f"{name}.weight"].T
        kernel = kernel.reshape(num_heads, -1, kernel.shape[1])
        bias = self.get(f"{name}.bias")
        return [kernel] if bias is None else [kernel, bias]

    def dense(self, dense, name):
        """Pairs of the variables of a `Dense` and the arrays for them."""
        yield dense.kernel, self[f"{name}.weight"].T
        yield dense.bias, self[f"{name}.bias"]

    def norm(self, norm, name):
        """Pairs of the variables of a norm and the arrays for them."""
        yield norm.gamma, self[f"{name}.weight"]
        yield norm.beta, self[f"{name}.bias"]

    def get(self, name):
        """A weight, or `None` if there is none of that name."""
        return self[name] if name in self else None


def in_order(owner, model, pairs):
    """Arrays in the order of `model.weights`.

    Args:
        owner: Name of the converter, to name in errors.
        model: A built model or layer.
        pairs: Pairs of a variable and the array that belongs into it. Other
            variables get what they have.
    """
    arrays = {id(weight): array for weight, array in pairs}
    for weight in model.weights:
        array = arrays.setdefault(id(weight), weight)
        if tuple(array.shape) != tuple(weight.shape):
            raise ValueError(
                f"`{owner}` finds a weight of shape {array.shape} for "
                f"`{weight.path}` of `model`, which is of shape "
                f"{tuple(weight.shape)}. Make a model of the same sizes."
            )
    return [ops.convert_to_numpy(arrays[id(w)]) for w in model.weights]


def identity_output(heads):
    """Output projection that leaves heads as they are.

    Args:
        heads: Kernel and bias of a projection into these heads.
    """
    _, num_heads, size = heads[0].shape
    kernel = np.eye(num_heads * size).reshape(num_heads, size, -1)
    return [kernel, np.zeros(num_heads * size)][: len(heads)]
