"""Every family on a GPU: its layouts in float32 and bf16, by each kernel that its layers need, beside a CPU's float32.

Linear attention runs by our chunks in float32, in bf16 by FLA where it runs.
"""

import copy
from contextlib import nullcontext

import pytest
import torch
from support.families import LAYOUTS, mixed_batch
from support.float64 import separate, torch_functions
from support.models import logprobs_and_gradients, relative_difference, small_model, weights_of
from support.routed import EXPERTS
from support.towers import CASES, encode, media_of, relative
from support.waits import never_waits

import mmpack as mp
from mmpack.adapters.transformers import attach, encode_once, packed_logprobs, record_routes
from mmpack.adapters.transformers import tower_attention as adapter
from mmpack.adapters.transformers.probe import probe_side
from mmpack.adapters.transformers.tower import tower_and_projector
from mmpack.cache import FeatureStore
from mmpack.errors import BackendError
from mmpack.families import FAMILIES
from mmpack.ops.attention import SEQUENCES, TREE
from mmpack.versions import takes_encoded_media, towers_take_known

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("untuned")]
WAYS = ("packed, rounded up", "shared", "left")
# full attention; windows and pictures that see both ways; heads of two sizes
BY_NAME = {name: tuple(TREE.names) for name in ("qwen2_5_vl", "gemma3", "gemma4", "kimi_k25")}
HALF = [(n, backend) for n in FAMILIES for backend in ("auto", *BY_NAME.get(n, ()))]


@pytest.fixture(scope="module")
def made():
    """A model on the CPU, its samples, their values and gradients there, in float32 and in bf16."""
    kept = {}

    def get(name):
        if name not in kept:
            kept.clear()  # one at a time
            model, samples = small_model(name), mixed_batch(name)
            low = copy.deepcopy(model).bfloat16()
            with torch_functions(low):
                kept[name] = model, samples, separate(model, samples), separate(low, samples)
        return kept[name]

    return get


@pytest.mark.parametrize("layout", WAYS)
@pytest.mark.parametrize("name", FAMILIES)
def test_float32(made, name, layout, no_tf32):
    model, samples, (wanted, gradients), _ = made(name)
    own = copy.deepcopy(model).cuda()
    with attach(own):
        values, found = logprobs_and_gradients(own, LAYOUTS[layout](samples).to("cuda"))
    assert (values.cpu() - wanted).abs().max() <= 1e-4
    assert relative_difference({n: g.cpu() for n, g in found.items()}, gradients) <= 1e-4


@pytest.mark.parametrize("layout", WAYS)
@pytest.mark.parametrize(("name", "backend"), HALF)
def test_bf16_is_about_as_near_as_a_cpus_separate_forwards(
    made, name, backend, layout, monkeypatch
):
    model, samples, (wanted, gradients), (apart, rounded) = made(name)
    monkeypatch.setenv("MMPACK_ATTENTION", backend)
    own = copy.deepcopy(model).bfloat16().cuda()
    try:
        with attach(own):
            values, found = logprobs_and_gradients(own, LAYOUTS[layout](samples).to("cuda"))
    except BackendError as error:
        if backend == "auto" and not FAMILIES[name].linear_attention:
            raise
        pytest.skip(str(error))
    off, bound = ((x.float().cpu() - wanted).square().mean() for x in (values, apart))
    assert off <= 3**2 * bound
    off, bound = (
        relative_difference({n: g.float().cpu() for n, g in x.items()}, gradients)
        for x in (found, rounded)
    )
    assert off <= 3 * bound


@pytest.mark.parametrize("make", [mp.pack, mp.pad])
def test_a_batch_moves_as_one(make):
    samples = mixed_batch("qwen2_5_vl")
    batch = make(samples, token_columns={"x": [range(len(s)) for s in samples]}).to("cuda")
    on_host = [
        name
        for name, value in vars(batch).items()
        for x in (value.values() if isinstance(value, dict) else [value])
        if torch.is_tensor(x) and not x.is_cuda
    ]
    assert on_host == [] and batch.pixel_values.is_cuda and batch.device.type == "cuda"


# ---- kept features, one backward of the tower, and chunks on a gpu, in bf16 ----


TRAINED = ["qwen2_5_vl", "qwen3_vl", "internvl"]


def made_once(name, dtype):
    model = small_model(name, factor=2).to("cuda", dtype)
    if not takes_encoded_media(model):
        pytest.skip("transformers before 5.19")
    return model


def packs_of(name):
    samples = mixed_batch(name)
    parts = ((0, 1), (2, 3), (4,))
    return [mp.pack([samples[i] for i in part], share_prefix=True).to("cuda") for part in parts]


def gradients(model, packs, features=None, **kwargs):
    model.zero_grad(set_to_none=True)
    with encode_once(model, packs, **kwargs) if features else nullcontext() as made_once:
        given = {"features": made_once} if features else kwargs
        for pack in packs:
            (
                packed_logprobs(model, pack.to("cuda"), **given) * weights_of(pack).cuda()
            ).sum().backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", TRAINED)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-4), (torch.bfloat16, 0.1)])
def test_one_backward_is_one_in_each_micro_batch(name, dtype, bound, no_tf32):
    model, packs = made_once(name, dtype), packs_of(name)
    on_host = [p.to("cpu") for p in packs]  # pixels move when they are encoded
    with attach(model):
        wanted = gradients(model, packs)
        for given, kwargs in (
            (packs, {"features": True}),
            (packs, {"features": True, "max_patches": 24}),
            (packs, {"max_patches": 24}),
            (on_host, {"features": True}),
        ):
            assert relative_difference(gradients(model, given, **kwargs), wanted) <= bound


@pytest.mark.parametrize("name", TRAINED)
@pytest.mark.parametrize("budgets", [(2**26, 0), (2**10, 2**26)])
def test_a_store_gives_the_bits_of_encoding_again(name, budgets):
    model, store = made_once(name, torch.bfloat16), FeatureStore(*budgets)
    batch = mp.pack(mixed_batch(name), share_prefix=True).to("cuda")
    for parameter in tower_and_projector(model).parameters():
        parameter.requires_grad_(False)
    with attach(model), torch.no_grad():
        wanted = packed_logprobs(model, batch)
        for _ in range(3):
            assert torch.equal(packed_logprobs(model, batch, features=store), wanted)
    assert store.stats.misses == len(batch.media) and store.stats.hits == 2 * len(batch.media)
    assert (store.stats.restored > 0) == (budgets[0] == 2**10)


def test_a_chunk_that_runs_again_draws_the_same_dropout():
    """Checkpointed as a whole, and layer by layer as transformers does: the same chunks, the same random numbers."""
    model, (batch, *_) = made_once("qwen2_5_vl", torch.float32).train(), packs_of("qwen2_5_vl")[1:]
    for block in model.model.visual.blocks:
        block.attn.attention_dropout = 0.5
    found = []
    for layers in (False, True):
        if layers:
            model.model.visual.gradient_checkpointing_enable({"use_reentrant": False})
        with attach(model):
            torch.manual_seed(0)
            found.append(gradients(model, [batch], max_patches=1))
    assert relative_difference(*found) <= 1e-4
    with attach(model):
        torch.manual_seed(1)
        assert relative_difference(gradients(model, [batch], max_patches=1), found[0]) > 1e-2


# ---- routes replayed on a gpu ----


LAYERS, CHOSEN = 4, 2


@pytest.fixture(scope="module")
def model():
    made = small_model("qwen3_vl_moe")
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if parameter.ndim == 3 and "experts" in name:
                parameter.mul_(12)  # another expert is another answer
    return made


@pytest.fixture(scope="module")
def samples():
    """Two branches of one prompt take the same experts through it."""
    out = mixed_batch("qwen3_vl_moe")
    for k, sample in enumerate(out):
        draw = torch.Generator().manual_seed(max(0, k - 1))
        taken = torch.rand(256, LAYERS, EXPERTS, generator=draw).argsort(-1)[: len(sample)]
        sample.routed_experts = mp.schema.compact_routes(taken[..., :CHOSEN].numpy(), EXPERTS)
    return out


def on_gpu(model, dtype):
    return copy.deepcopy(model).to(device="cuda", dtype=dtype)


def test_float32_is_the_cpus(model, samples):
    batch = mp.pack(samples, share_prefix=True)
    with attach(model):
        wanted, gradients = logprobs_and_gradients(model, batch)
    other = on_gpu(model, torch.float32)
    with attach(other), record_routes(other) as taken:
        values, found = logprobs_and_gradients(other, batch.to("cuda"))
    recorded = batch.routed_experts[: batch.num_tokens].long()
    assert torch.equal(taken.rows[: batch.num_tokens].cpu(), recorded)
    assert (values.cpu() - wanted).abs().max() <= 1e-3
    assert relative_difference({n: g.cpu() for n, g in found.items()}, gradients) <= 1e-3


def test_bf16_takes_the_experts_of_the_trace(model, samples):
    """Its own routers take others at some tokens, and then logprobs are off by more."""
    bare = [copy.copy(s) for s in samples]
    for sample in bare:
        sample.routed_experts = None
    with attach(model), record_routes(model) as taken, torch.no_grad():
        batch = mp.pack(bare)
        wanted = packed_logprobs(model, batch)
        for sample, own in zip(samples, batch.unpack_tokens(taken.rows), strict=True):
            sample.routed_experts = mp.schema.compact_routes(own.numpy(), EXPERTS)
    other = on_gpu(model, torch.bfloat16)
    routed = mp.pack(samples).to("cuda")
    with attach(other), record_routes(other) as taken, torch.no_grad():
        values = packed_logprobs(other, routed)
    assert torch.equal(taken.rows, routed.routed_experts.long())
    assert (values.cpu() - wanted).abs().max() <= 0.3


def test_more_than_256_experts_are_int32_on_the_device(samples):
    from transformers import Qwen3VLMoeForConditionalGeneration

    config = copy.deepcopy(small_model("qwen3_vl_moe").config)
    config.text_config.num_experts = 300
    torch.manual_seed(0)
    wide = Qwen3VLMoeForConditionalGeneration(config).to("cuda").eval()
    for sample in samples:
        taken = torch.rand(len(sample), LAYERS, 300).argsort(-1)[..., :CHOSEN]
        sample.routed_experts = mp.schema.compact_routes(taken.numpy(), 300)
    batch = mp.pack(samples).to("cuda")
    assert batch.routed_experts.dtype == torch.int32
    with attach(wide), record_routes(wide) as routes, torch.no_grad():
        packed_logprobs(wide, batch)
    assert torch.equal(routes.rows, batch.routed_experts.long())


# ---- vision towers on a gpu under each backend, against the same tower's own attention in fp32  ----


SOME = [c for c in CASES if c[1] in ("pictures that windows don't divide", "videos", "tiles")]


def on_gpu_tower(media):
    return {name: x.cuda() for name, x in media.items()}


def on_cpu(gradients):
    return {name: x.cpu() for name, x in gradients.items()}


@pytest.mark.parametrize(("family", "grids"), SOME)
@pytest.mark.parametrize("backend", ["auto", *SEQUENCES.names])
def test_features_and_gradients_in_bf16(family, grids, backend, monkeypatch):
    """Heads of 16, as small models have them."""
    reason = SEQUENCES.explain(torch.device("cuda"), torch.bfloat16, 16).get(backend)
    if reason is not None:
        pytest.skip(reason)
    model, (modality, media) = small_model(family), media_of(family, grids)
    wanted, gradients = encode(model, modality, media)
    model = model.to("cuda", torch.bfloat16)
    own, own_gradients = encode(model, modality, on_gpu_tower(media))
    monkeypatch.setenv("MMPACK_TOWER_ATTENTION", backend)
    with attach(model, text=False):
        found, others = encode(model, modality, on_gpu_tower(media))
    for a, b, c in zip(found, own, wanted, strict=True):
        assert relative(a.cpu(), c) <= max(1.2 * relative(b.cpu(), c), 5e-3)
    assert others.keys() == own_gradients.keys()
    off, apart = (relative_difference(on_cpu(g), gradients) for g in (others, own_gradients))
    assert off <= max(1.2 * apart, 5e-3), (off, apart)


@pytest.mark.skipif(
    not towers_take_known(), reason="this transformers' towers make all by themselves"
)
@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_nothing_waits_for_the_gpu(family):
    """From the batch's grids to the features."""
    model = small_model(family).to("cuda", torch.bfloat16)
    _, media = media_of(family, "pictures that windows don't divide")
    media["pixel_values"] = media["pixel_values"].cuda()

    def run():
        arguments = adapter.on_their_device(model, media)
        return model.model.get_image_features(**arguments, return_dict=True).pooler_output

    with attach(model, text=False):
        never_waits(run)


# ---- the probe on a gpu ----


FAMILIES_probe = ("qwen2_5_vl", "qwen3_vl")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES_probe)
def test_layouts_are_alike(family, dtype, no_tf32):
    model, samples = small_model(family).to("cuda"), mixed_batch(family)
    packed = mp.probe.record(probe_side(model, dtype=dtype), samples)
    for layout in ("shared", "padded", "alone"):
        report = mp.probe.run(packed, probe_side(model, layout=layout, dtype=dtype), samples)
        assert report.ok, (layout, report.text())
        assert len(report.modules) > 60
        # Alone, a text's embeddings are the first layer's input as they are: nothing is merged into them.
        text_only = ["input_layernorm<in, sample 's4'"] if layout == "alone" else []
        assert len(report.notes) == len(text_only)
        assert all(part in note for part, note in zip(text_only, report.notes, strict=True))


def test_the_gpu_is_alike_the_cpu(no_tf32):
    model, samples = small_model("qwen2_5_vl"), mixed_batch("qwen2_5_vl")
    a = mp.probe.record(probe_side(model, "cpu"), samples)
    report = mp.probe.run(a, probe_side(copy.deepcopy(model).to("cuda"), "cuda"), samples)
    assert report.ok, report.text()


def test_tf32_is_refused_and_put_back(no_tf32):
    model, samples = small_model("qwen2_5_vl").to("cuda"), mixed_batch("qwen2_5_vl")[:1]
    torch.backends.cuda.matmul.allow_tf32 = True
    with pytest.raises(mp.ArgumentError, match="TF32"):
        mp.probe.record(probe_side(model), samples)
    mp.probe.record(probe_side(model, dtype=torch.bfloat16), samples)  # has no such products
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = True
    mp.probe.record(probe_side(model), samples)
    assert torch.backends.cudnn.allow_tf32
