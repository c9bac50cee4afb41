"""Traces as other frameworks' kernels make them: against the closed forms that published runs are predicted by."""

from dataclasses import replace

import pytest
from published_runs.shapes import Kernels, ModelShape, layer_profiles

from steelyard.cost.job import DeviceGroup, Job
from steelyard.cost.kernels import job_under
from steelyard.engines.deepspeed import DEEPSPEED
from steelyard.engines.engine import Engine
from steelyard.engines.execution import Execution
from steelyard.engines.megatron import MEGATRON
from steelyard.engines.native import NATIVE
from steelyard.engines.torchtitan import TORCHTITAN
from steelyard.hardware import parse_cluster
from steelyard.model.chain import ModelChain
from steelyard.model.read import chain_from_config
from steelyard.profiles.profile import LayerProfile, Work
from steelyard.tracer.trace import trace
from tests.shapes import tp_shape

SEQ_LEN, VOCAB = 512, 4096
CONFIG = {
    "model_type": "llama",
    "hidden_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 1536,
    "vocab_size": VOCAB,
    "max_position_embeddings": SEQ_LEN,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
SHAPE = ModelShape(
    num_layers=2,
    hidden=512,
    heads=8,
    kv_heads=4,
    head_dim=64,
    ffn=1536,
    gated=True,
    vocab=VOCAB,
    seq_len=SEQ_LEN,
    tied="no",
    rotary=True,
)
EAGER = Kernels(norm=False, rotary=False, activation=False, loss=False, attention="flash")
FUSED = Kernels(norm=True, rotary=True, activation=True, loss=True, attention="flash")
SHAPES = [(1, False), (2, False), (4, True)]

FUSING = replace(NATIVE, execution=Execution(fused_kernels=True))


@pytest.fixture(scope="module")
def traced() -> Job:
    chain = chain_from_config(CONFIG, name="small")
    return Job(
        chain=chain,
        groups=(
            DeviceGroup(
                profile=trace(chain, seq_len=SEQ_LEN, precision="bf16", degrees=(2, 4)),
                cluster=parse_cluster("1x8xh100-80gb"),
                budget_bytes=2**36,
            ),
        ),
        seq_len=SEQ_LEN,
        global_batch=8,
        precision="bf16",
    )


def layer_of(job: Job, layer_type: str, tp: int, sp: bool) -> LayerProfile:
    found = job.profile.layer(layer_type, tp_shape(tp, sp=sp))
    assert found is not None
    return found


def closed(kernels: Kernels, layer_type: str, tp: int, sp: bool) -> LayerProfile:
    return next(each for each in layer_profiles(SHAPE, kernels, tp=tp, sp=sp) if each.kind == layer_type)


@pytest.mark.slow
@pytest.mark.parametrize(("tp", "sp"), SHAPES)
def test_fused_blocks_keep_what_the_closed_form_says(traced: Job, tp: int, sp: bool) -> None:
    found = layer_of(job_under(traced, MEGATRON), "block", tp, sp).saved_bytes.at(1)
    assert found == pytest.approx(closed(FUSED, "block", tp, sp).saved_bytes.at(1), rel=0.02)
    assert found < layer_of(traced, "block", tp, sp).saved_bytes.at(1)


@pytest.mark.slow
@pytest.mark.parametrize("layer_type", ["block", "head"])
@pytest.mark.parametrize(("tp", "sp"), SHAPES)
def test_fused_kernels_move_as_much_less_as_the_closed_form_says(
    traced: Job, layer_type: str, tp: int, sp: bool
) -> None:
    fused, eager = layer_of(job_under(traced, MEGATRON), layer_type, tp, sp), layer_of(traced, layer_type, tp, sp)
    expected, before = closed(FUSED, layer_type, tp, sp), closed(EAGER, layer_type, tp, sp)
    for direction in ("forward", "backward"):
        now, then, wanted, was = (getattr(each, direction).memory_bytes for each in (fused, eager, expected, before))
        assert now.per_sample - then.per_sample == pytest.approx(wanted.per_sample - was.per_sample, rel=0.01)
        assert now.per_sample >= 0


@pytest.mark.slow
def test_torchtitan_repeats_three_of_seven_products(traced: Job) -> None:
    def selective(job: Job) -> Work:
        return layer_of(job, "block", 1, False).recomputation("selective").work  # type: ignore[arg-type]

    more = selective(job_under(traced, TORCHTITAN)).matmul_flop.at(1) - selective(traced).matmul_flop.at(1)
    assert more == 2 * SEQ_LEN * (512 * 256 + 512 * 512 + 512 * 1536)


@pytest.mark.slow
def test_torchtitan_keeps_as_much_less(traced: Job) -> None:
    kept = [
        layer_of(job, "block", 1, False).recomputation("selective") for job in (traced, job_under(traced, TORCHTITAN))
    ]  # type: ignore[arg-type]
    assert kept[0].saved_bytes.at(1) - kept[1].saved_bytes.at(1) == 2 * SEQ_LEN * (256 + 512 + 1536)
    assert kept[1].saved_bytes.at(1) == pytest.approx(SEQ_LEN * (4 * 512 + 4 * 512 + 2 * 256 + 2 * 1536), rel=0.02)


@pytest.mark.slow
def test_a_framework_that_repeats_whole_blocks_repeats_all_that_forward_does(traced: Job) -> None:
    block = layer_of(job_under(traced, TORCHTITAN), "block", 2, False)
    again = block.recomputation("full")  # type: ignore[arg-type]
    assert (again.work, again.collectives) == (block.forward, block.forward_collectives)
    assert again.work.matmul_flop.at(1) > layer_of(traced, "block", 2, False).recomputation("full").work.matmul_flop.at(
        1
    )  # type: ignore[arg-type]


@pytest.mark.parametrize("engine", [NATIVE, DEEPSPEED])
def test_kernels_of_our_own_stay_as_traced(traced: Job, engine: Engine) -> None:
    assert job_under(traced, engine).profile == traced.profile


def test_what_was_measured_stays_as_it_was(traced: Job) -> None:
    identity = traced.profile.identity.model_copy(update={"method": "measured", "num_devices": 8})
    measured = traced.on(profile=traced.profile.model_copy(update={"identity": identity}))
    assert job_under(measured, MEGATRON).profile == measured.profile


@pytest.mark.slow
def test_a_model_of_another_form_stays_as_traced_but_for_whole_blocks(traced: Job) -> None:
    config = {key: value for key, value in CONFIG.items() if key != "rms_norm_eps"} | {"model_type": "gpt_neox"}
    other = replace(traced, chain=chain_from_config(config, name="other"))
    before, after = (layer_of(job, "block", 1, False) for job in (other, job_under(other, MEGATRON)))
    assert (after.forward, after.saved_bytes) == (before.forward, before.saved_bytes)


@pytest.mark.slow
def test_kernels_are_fused_where_ranks_divide_experts_too() -> None:
    chain = model_of_experts()
    job = Job(
        chain=chain,
        groups=(
            DeviceGroup(
                profile=trace(chain, seq_len=64, precision="bf16", degrees=(1,)),
                cluster=parse_cluster("1x8xh100-80gb"),
                budget_bytes=2**36,
            ),
        ),
        seq_len=64,
        global_batch=8,
        precision="bf16",
    )
    layer_type = next(layer_type.name for layer_type in chain.layer_types if layer_type.num_experts)
    fused = job_under(job, FUSING)
    eager_layer, fused_layer = (each.layer(layer_type, {}, expert_degree=2) for each in (job, fused))
    assert eager_layer is not None
    assert fused_layer is not None
    for name in ("forward", "backward"):
        eager_work, fused_work = getattr(eager_layer, name), getattr(fused_layer, name)
        assert fused_work.memory_bytes.at(2) < eager_work.memory_bytes.at(2)
        assert fused_work.matmul_flop == eager_work.matmul_flop
    assert fused_layer.saved_bytes.at(2) < eager_layer.saved_bytes.at(2)


@pytest.mark.slow
def test_one_kernel_for_the_activation_of_experts_keeps_less_for_every_pair() -> None:
    """Of twice the pairs, twice: 2 bytes of each entry between an expert's matrices. The rest is alike."""
    chain = model_of_experts()
    job = Job(
        chain=chain,
        groups=(
            DeviceGroup(
                profile=trace(chain, seq_len=SEQ_LEN, precision="bf16", degrees=(1,)),
                cluster=parse_cluster("1x8xh100-80gb"),
                budget_bytes=2**36,
            ),
        ),
        seq_len=SEQ_LEN,
        global_batch=8,
        precision="bf16",
    )
    layer_type = next(layer_type.name for layer_type in chain.layer_types if layer_type.num_experts)
    saved = []
    for each in (job, job_under(job, FUSING)):
        layer = each.profile.layer(layer_type, {})
        assert layer is not None
        assert layer.divided_experts is not None
        even, twice = layer.divided_experts
        saved.append(twice.saved_bytes.at(1) - even.saved_bytes.at(1))
    assert saved[0] - saved[1] == pytest.approx(2 * SEQ_LEN * 2 * CONFIG["intermediate_size"])


def model_of_experts() -> ModelChain:
    config = CONFIG | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
    return chain_from_config(config, name="experts")
