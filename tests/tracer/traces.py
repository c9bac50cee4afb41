"""Traces that several tests read, made once."""

from functools import cache

from steelyard.model.chain import ModelChain
from steelyard.precision import Precision
from steelyard.profiles.profile import Profile
from steelyard.tracer.cache import cached_trace
from tests.runtime.family_chain import chain_of, length_of
from tests.tracer.examples import SEQ_LEN, gpt_neox, llama

FAMILIES = ("llama", "gpt_neox")
DIVIDED = ["gpt2", "gemma2", "mixtral", "qwen3_moe", "bert", "t5"]
"""Families of the runtime's tests that are also traced at tp 2."""


@cache
def known(family: str) -> ModelChain:
    """One of `FAMILIES`, which is split when it is first asked for."""
    return llama() if family == "llama" else gpt_neox()


@cache
def traced(family: str, precision: Precision) -> Profile:
    """The trace of one of `FAMILIES`, in bf16 at tp 1, 2 and 4."""
    degrees = (1, 2, 4) if precision == "bf16" else (1,)
    return cached_trace(known(family), seq_len=SEQ_LEN, precision=precision, degrees=degrees)


@cache
def traced_family(name: str) -> Profile:
    """The trace of a family of the runtime's tests."""
    chain = chain_of(name)
    degrees = (1, 2) if name in DIVIDED else (1,)
    return cached_trace(chain, seq_len=length_of(chain), precision="bf16", degrees=degrees)
