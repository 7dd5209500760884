from helpers import on_ranks  # noqa: F401
