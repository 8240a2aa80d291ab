"""The type checker of the import hook in conftest.py: an int will do where a float is expected."""

from beartype import BeartypeConf, beartype

checked = beartype(conf=BeartypeConf(is_pep484_tower=True))
