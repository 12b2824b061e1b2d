"""Small helpers shared by the layers."""


def check_positive_integers(owner, **arguments):
    """Raises `ValueError` unless each argument is a positive integer."""
    for name, value in arguments.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(
                f"`{type(owner).__name__}` needs a positive integer for "
                f"argument `{name}`. Received: {name}={value}"
            )


def check_rates(owner, **arguments):
    """Raises `ValueError` unless each argument is a rate in `[0, 1)`."""
    for name, value in arguments.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            in_range = False
        else:
            in_range = 0 <= value < 1
        if not in_range:
            raise ValueError(
                f"`{type(owner).__name__}` needs a number from 0 up to, but "
                f"not including, 1 for argument `{name}`. "
                f"Received: {name}={value}"
            )


def check_choice(owner, choices, **arguments):
    """Raises `ValueError` unless each argument is one of `choices`."""
    for name, value in arguments.items():
        if value not in choices:
            raise ValueError(
                f"`{type(owner).__name__}` needs one of {tuple(choices)} for "
                f"argument `{name}`. Received: {name}={value!r}"
            )


def clone_initializer(initializer):
    """Copies an initializer, because one instance always draws one value."""
    return initializer.__class__.from_config(initializer.get_config())
