"""Shape of a layer under tensor parallelism, the key of profiles."""


def tp_shape(tp: int, sp: bool = False) -> dict[str, int]:
    """The degrees that divide a layer at a tensor-parallel degree; none at 1."""
    return {name: tp for name in (("tp", "sp") if sp else ("tp",)) if tp > 1}
