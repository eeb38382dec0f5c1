"""The runtime checker of the test run: beartype, with an int where a float is annotated, as PEP 484 has it."""

from beartype import BeartypeConf, beartype

checked = beartype(conf=BeartypeConf(is_pep484_tower=True))
