"""Counts what a function stores, from the program that JAX makes of it."""

import keras
import numpy as np
import pytest
from keras import ops

on_jax = pytest.mark.skipif(
    keras.backend.backend() != "jax", reason="counts in the programs of JAX"
)


def largest_intermediate(fn, *arrays):
    """Elements of the largest tensor in a function, and in its gradient."""
    import jax

    def total(*arrays):
        return ops.sum(ops.square(fn(*arrays)))

    gradient = jax.grad(total, argnums=tuple(range(len(arrays))))
    return tuple(
        _largest(jax.make_jaxpr(function)(*arrays).jaxpr)
        for function in (fn, gradient)
    )


def _largest(jaxpr):
    import jax

    sizes = [0]
    for equation in jaxpr.eqns:
        sizes += [np.prod(x.aval.shape, dtype=int) for x in equation.outvars]
        for inner in jax.core.jaxprs_in_params(equation.params):
            sizes.append(_largest(inner))
    return max(sizes)
