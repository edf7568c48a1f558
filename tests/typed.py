"""The tests' type checker at run time: beartype, for which an int is a float, as for all other type checkers."""

from beartype import BeartypeConf, beartype

check = beartype(conf=BeartypeConf(is_pep484_tower=True))
