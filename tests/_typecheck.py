"""The type checker of the import hook in conftest.py: an int will do where a float is expected."""

from beartype import BeartypeConf, beartype

_checked = beartype(conf=BeartypeConf(is_pep484_tower=True))


def checked(function):
    """Leaves out functions in functions: they would be compiled anew for each call around them."""
    return function if "<locals>" in function.__qualname__ else _checked(function)
