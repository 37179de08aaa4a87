"""OpenRLHF's real Actor and ActorPPOTrainer, stock and on packs: logprobs, entropies, gradients, metrics, weights."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from support.models import small_model
from support.openrlhf_parts import import_trainer, strategy_of
from support.openrlhf_steps import OPTIONS, RANKS
from support.openrlhf_steps import run as run_step
from support.process import free_port

from mmpack.adapters.openrlhf import use
from mmpack.adapters.openrlhf.actor import rows_to_samples
from mmpack.errors import LayoutError, ModelError
from mmpack.families import get_family

pytestmark = pytest.mark.openrlhf
STOCK, OURS = "openrlhf.cli.train_ppo_ray", "mmpack.adapters.openrlhf"


@pytest.fixture(scope="module", autouse=True)
def trainer():
    pytest.importorskip("deepspeed")
    return import_trainer()


@pytest.fixture
def actor(small_checkpoint, trainer):
    out = trainer.Actor(str(small_checkpoint), attn_implementation="sdpa", temperature=0.8)
    out.model.float()
    return out


@pytest.fixture(scope="module")
def rows(fixture):
    """Two prompts, of one and of two pictures, two responses each; a tool's token in the second."""
    from matrix.openrlhf_trace import experience

    two = next(n for n, pictures in enumerate(fixture.pictures) if len(pictures) == 2)
    made = experience(replace(fixture, rows=[r for r in fixture.rows if r[0] in (0, two)]))
    assert len(made.sequences) == 4 and two != 0
    made.action_mask[1, made.action_mask[1].nonzero()[1, 0]] = 0
    return made


def call(actor, rows, **options):
    """As OpenRLHF's training step calls it."""
    from openrlhf.utils.vlm_utils import merge_mm_train_inputs

    inputs = merge_mm_train_inputs(rows.mm_train_inputs, "cpu")
    return actor(
        rows.sequences,
        rows.action_mask,
        attention_mask=rows.attention_mask,
        return_output=True,
        ring_attn_group=None,
        **(inputs | options),
    )


def value_and_gradients(actor, rows):
    actor.model.zero_grad()
    with torch.compiler.set_stance("force_eager"):  # OpenRLHF compiles its entropy
        logprobs, output = call(actor, rows, return_entropy=True)
    entropy = output.entropy[:, -rows.action_mask.shape[1] :] * rows.action_mask
    weights = torch.randn(logprobs.shape, generator=torch.Generator().manual_seed(1))
    ((logprobs + 0.1 * entropy) * weights).sum().backward()
    gradients = {n: p.grad.clone() for n, p in actor.model.named_parameters() if p.grad is not None}
    return logprobs.detach(), entropy.detach(), gradients


def test_logprobs_entropies_and_gradients_are_stock_ones(actor, rows):
    stock = value_and_gradients(actor, rows)
    with use(actor):
        handle = actor.forward.__self__
        packed = value_and_gradients(actor, rows)
    for a, b in zip(stock[:2], packed[:2], strict=True):
        assert a.shape == b.shape and (a - b).abs().max() <= 1e-5
        assert (b[rows.action_mask == 0] == 0).all()
    assert stock[2].keys() == packed[2].keys()
    for name, own in stock[2].items():
        assert (own - packed[2][name]).norm() <= 1e-4 * own.norm() + 1e-6, name
    # prompts and pictures once
    stats = handle.stats
    assert stats["tokens_unshared"] == rows.attention_mask.sum() > 1.5 * stats["tokens"]
    patches = sum(len(m["pixel_values"]) for m in rows.mm_train_inputs)
    assert patches == 2 * stats["patches_encoded"]
    assert "forward" not in vars(actor)


def test_a_hybrid_family(trainer, tmp_path):
    """Qwen3.5, which OpenRLHF names: positions in three rows, layers of linear attention."""
    from conformance.subject import Subject
    from openrlhf.utils.vlm_utils import process_prompt_with_images
    from support.kits import get_kit

    subject = Subject(get_kit("qwen3_5"))
    subject.kit.small(spread=2.0).save_pretrained(tmp_path)
    actor = trainer.Actor(str(tmp_path), attn_implementation="eager")
    actor.model.float()
    content = [{"type": "image"}, {"type": "text", "text": "What?"}]
    text = subject.processor.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    made = [process_prompt_with_images(subject.processor, text, [p]) for p in subject.pictures]
    counts = ((0, 4), (0, 7), (1, 3), (1, 5))
    rows = [torch.tensor(made[n][0] + list(range(7, 7 + k))) for n, k in counts]
    actions = [
        torch.arange(1, len(r)) >= len(r) - k for r, (_, k) in zip(rows, counts, strict=True)
    ]
    pad = torch.nn.utils.rnn.pad_sequence
    part = SimpleNamespace(
        sequences=pad(rows, batch_first=True),
        attention_mask=pad([torch.ones_like(r) for r in rows], batch_first=True),
        action_mask=pad(actions, batch_first=True).long(),
        mm_train_inputs=[made[n][1] for n, _ in counts],
    )
    stock = value_and_gradients(actor, part)
    with use(actor):
        packed = value_and_gradients(actor, part)
    for a, b in zip(stock[:2], packed[:2], strict=True):
        assert (a - b).abs().max() <= 1e-5
    assert stock[2].keys() == packed[2].keys()
    off = sum((own - packed[2][name]).norm() ** 2 for name, own in stock[2].items())
    assert off.sqrt() <= 1e-5 * sum(own.norm() ** 2 for own in stock[2].values()).sqrt()


def test_rows_that_are_padded_left_and_narrow_action_masks(actor, rows):
    """Columns are those of the last tokens, whatever lies before."""
    whole = rows.attention_mask.sum(dim=1) <= rows.sequences.shape[1] - 3
    names = ("sequences", "attention_mask", "action_mask")
    part = SimpleNamespace(**{n: getattr(rows, n).roll(3, dims=1)[whole] for n in names})
    part.action_mask = part.action_mask[:, -60:]
    part.mm_train_inputs = [m for m, k in zip(rows.mm_train_inputs, whole, strict=True) if k]
    assert len(part.sequences) > 1 and part.action_mask.any()
    with torch.no_grad():
        stock, _ = call(actor, part)
        with use(actor):
            packed, _ = call(actor, part)
    assert (stock - packed).abs().max() <= 1e-5


def test_rows_without_pictures_and_without_actions(actor):
    ids = torch.randint(0, 1000, (3, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[2, 6:] = 0
    actions = mask[:, 1:].clone()
    actions[:, :3] = 0
    actions[1] = 0
    with torch.no_grad():
        stock = actor(ids, actions, mask)
        with use(actor):
            packed = actor(ids, actions, mask)
    assert (stock - packed).abs().max() <= 1e-5 and (packed[1] == 0).all()


def test_what_it_cannot_do_is_refused(actor, rows):
    family = get_family("internvl")
    ids = [5, *[family.image_token_id] * family.vision_tokens((1, 4, 4)), 6, 7]
    ids, tiles = torch.tensor([ids]), torch.zeros(2, 3, *[4 * family.patch_size] * 2)
    with pytest.raises(ModelError, match="internvl cut pictures into tiles"):
        given = ids, torch.ones_like(ids), torch.tensor([[1]])
        rows_to_samples(*given, {"pixel_values": tiles}, family)
    handle = use(actor)
    with pytest.raises(ModelError, match="computes for it already"):
        use(actor)
    with pytest.raises(ModelError, match="mmpack makes those of actions"):
        actor(rows.sequences, attention_mask=rows.attention_mask, return_logprobs=True)
    with pytest.raises(ModelError, match="ring attention is on"):
        actor(rows.sequences, rows.action_mask, rows.attention_mask, ring_attn_group=object())
    with pytest.raises(ModelError, match="pixel_values_videos has no place"):
        call(actor, rows, pixel_values_videos=torch.zeros(4, 1176))
    grids = torch.cat([m["image_grid_thw"] for m in rows.mm_train_inputs])
    pixels = torch.cat([m["pixel_values"] for m in rows.mm_train_inputs])
    last = int(grids[-1].prod())
    with pytest.raises(LayoutError, match="dropped"):  # one too few
        call(actor, rows, image_grid_thw=grids[:-1], pixel_values=pixels[:-last])
    more = {"image_grid_thw": torch.cat([grids, grids[-1:]])}
    with pytest.raises(LayoutError, match="1 more than the rows have placeholders for"):
        call(actor, rows, pixel_values=torch.cat([pixels, pixels[-last:]]), **more)
    handle.stop()
    assert "forward" not in vars(actor)


@pytest.mark.parametrize(
    ("option", "said"),
    [
        (("--ds.tensor_parallel_size", 2), "tensor parallel is on"),
        (("--ds.deepcompile",), "DeepCompile is on"),
        (("--actor.aux_loss_coef", 0.1), "the router's auxiliary loss is on"),
    ],
)
def test_options_that_it_cannot_obey_are_refused(small_checkpoint, capsys, option, said):
    with pytest.raises(SystemExit) as left:
        strategy_of(OURS, "--actor.model_name_or_path", small_checkpoint, *OPTIONS, *option)
    [line] = capsys.readouterr().err.splitlines()
    assert left.value.code == 2 and said in line and "Fix: " in line


def test_the_page_s_code(small_checkpoint, actor):
    from ray import cloudpickle
    from test_docs_run import blocks, run

    args = strategy_of(STOCK, "--actor.model_name_or_path", small_checkpoint, *OPTIONS).args
    [code] = [block for block in blocks("docs/adapters.md") if "get_strategy(args)" in block[1]]
    ran = run("docs/adapters.md", {"args": args, "actor": actor}, [code])
    assert type(ran["strategy"]).__name__ == "MmpackStrategy" and ran["strategy"].args is args
    sent = cloudpickle.loads(cloudpickle.dumps(ran["strategy"]))  # as Ray hands it to workers
    assert type(sent) is type(ran["strategy"]) and sent.args.train == args.train
    assert actor.forward == ran["handle"].forward


@pytest.mark.slow
def test_a_trainer_s_step_on_two_ranks(small_checkpoint, tmp_path):
    """Under ZeRO-3, each rank with other rows: old and reference logprobs, loss with KL and entropy, a step of Adam."""
    torch.multiprocessing.spawn(
        run_step, (free_port(), small_checkpoint, tmp_path, 3), nprocs=RANKS
    )
    before = dict(small_model("qwen2_5_vl", factor=2).named_parameters())
    for rank in range(RANKS):
        ran = torch.load(tmp_path / f"{rank}.pt")
        stock, packed = ran[STOCK], ran[OURS]
        assert stock["stats"] is None and packed["stats"]["tokens"] > 0
        assert (stock["old"] - packed["old"]).abs().max() <= 1e-5
        assert stock["status"].keys() == packed["status"].keys() >= {"policy_loss", "kl"}
        for name, value in stock["status"].items():
            assert packed["status"][name] == pytest.approx(value, rel=1e-4, abs=1e-5), name
        assert packed["status"]["actor_grad_norm"] > 1e-3
        apart = sum((w - packed["weights"][n]).norm() ** 2 for n, w in stock["weights"].items())
        moved = sum((w - before[n]).norm() ** 2 for n, w in stock["weights"].items())
        assert apart.sqrt() <= 1e-4 * moved.sqrt()
