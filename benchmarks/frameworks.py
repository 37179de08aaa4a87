"""What each framework's own code and mmpack put through the model, for one training pass over the same rollout.

    python benchmarks/frameworks.py trl trainer accelerate     # in .venv; lightning, verl, openrlhf, unirl: in theirs

Rows of the text model and patches of the tower are counted by hooks of its modules, in a tiny Qwen2.5-VL on a CPU: they
follow from the batch, not from the machine. Each framework is a file of benchmarks/results/frameworks/; `--page` writes
the table of docs/frameworks.md from them, `--check` says whether it is there.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import json
import runpy
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).parent / "results" / "frameworks"
PAGE = ROOT / "docs" / "frameworks.md"
BEGIN, END = "<!-- counts: benchmarks/frameworks.py -->\n", "<!-- /counts -->\n"
PROMPTS, RESPONSES = 2, 8
HEAD = (
    "| framework, as it was run | version | rows: stock | mmpack | patches: stock | mmpack |\n"
    "| --- | --- | ---: | ---: | ---: | ---: |\n"
)
Counts = dict[str, int]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(RUNNERS)}")
    parser.add_argument("--page", action="store_true", help="write the table of docs/frameworks.md")
    parser.add_argument("--check", action="store_true", help="exit 1 if the table is another")
    args = parser.parse_args()
    for name in args.names:
        if name not in RUNNERS:
            parser.error(f"{name} is not one of {', '.join(RUNNERS)}")
        measure(name)
    if args.page or args.check:
        text = PAGE.read_text(encoding="utf-8")
        made = paged(text)
        if args.check and made != text:
            print(
                "docs/frameworks.md is not what its results give. Fix: python benchmarks/frameworks.py --page",
                file=sys.stderr,
            )
            return 1
        PAGE.write_text(made, encoding="utf-8")
    return 0


def measure(name: str) -> None:
    """Run one framework with and without mmpack, and write its file."""
    runner, package, said = RUNNERS[name]
    stock, own = runner(rollout())
    versions = {p: importlib.metadata.version(p) for p in (package, "transformers", "torch")}
    row = {"framework": said, "versions": versions, "stock": stock, "mmpack": own}
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(row, indent=1) + "\n", encoding="utf-8")
    print(f"{name}: {stock} {own}")


def paged(text: str) -> str:
    """The page with the table of the results."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    rows = [
        json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
        for name in RUNNERS
        if (RESULTS / f"{name}.json").exists()
    ]
    lines = [
        f"| {row['framework']} | {next(iter(row['versions'].values()))} "
        f"| {row['stock']['rows']:,} | {row['mmpack']['rows']:,} "
        f"| {row['stock']['patches']:,} | {row['mmpack']['patches']:,} |\n"
        for row in rows
    ]
    return before + BEGIN + HEAD + "".join(lines) + END + after


def rollout() -> Any:
    """Two prompts with a picture each, eight responses of 2 to 16 tokens to each."""
    from matrix.fixture import END_OF_TURN, make_fixture

    fixture = make_fixture()
    one_picture = [n for n, pictures in enumerate(fixture.pictures) if len(pictures) == 1]
    rows, ids = [], []
    for number in one_picture[:PROMPTS]:
        for k in range(RESPONSES):
            draw = torch.Generator().manual_seed(100 * number + k)
            response = torch.randint(1000, (1 + 2 * k,), generator=draw).tolist() + [END_OF_TURN]
            rows.append((number, response, [-1.0] * len(response)))
            ids.append((f"{number}/{k}", str(number)))
    return replace(fixture, rows=rows, ids=ids)


class Watch:
    """Counts what goes into the text model and the tower of a model."""

    def __init__(self, model: Any):
        self.counts = {"rows": 0, "patches": 0}
        self.hooks = [
            model.get_decoder().register_forward_pre_hook(self._rows, with_kwargs=True),
            model.model.visual.register_forward_pre_hook(self._patches, with_kwargs=True),
        ]

    def _rows(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = kwargs.get("inputs_embeds")
        given = given if given is not None else kwargs.get("input_ids", args[0] if args else None)
        self.counts["rows"] += given.shape[0] * given.shape[1]

    def _patches(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.counts["patches"] += (args[0] if args else kwargs["hidden_states"]).shape[0]

    def stop(self) -> Counts:
        for hook in self.hooks:
            hook.remove()
        return self.counts


def watched(model: Any, call: Callable[[], Any]) -> Counts:
    watch = Watch(model)
    call()
    return watch.stop()


# -- loops of one's own ------------------------------------------------------------------------------------------------


def loop_rows(fixture: Any) -> list[dict[str, Any]]:
    """The rollout as examples/stock_step.py has it."""
    return [
        {
            "messages": fixture.messages[number],
            "id": group,
            "response_ids": torch.tensor(response),
            "logprobs": torch.tensor(logprobs),
            "advantage": torch.tensor([k % RESPONSES - 3.5]),
        }
        for k, ((number, response, logprobs), (_, group)) in enumerate(
            zip(fixture.rows, fixture.ids, strict=True)
        )
    ]


def of_an_example(
    name: str, train: Callable[[Any, list[Any], bool], None], fixture: Any
) -> tuple[Counts, Counts]:
    """An example of examples/ on the rollout; it makes its model by `make_model`, and takes two steps."""
    sys.path.insert(0, str(ROOT / "examples"))
    import stock_step

    example = __import__(name)
    import trainer_policy

    for module in (stock_step, trainer_policy):
        module.hf_processor = fixture.hf_processor
    rows, found = loop_rows(fixture), []
    for packed in (False, True):
        watches: list[Watch] = []

        def make_model(watches: list[Watch] = watches) -> Any:
            model = stock_step.make_model()
            watches.append(Watch(model))
            return model

        example.make_model = make_model
        train(example, list(trainer_policy.samples_of(rows)) if packed else rows, packed)
        [watch] = watches
        found.append({name: count // 2 for name, count in watch.stop().items()})
    return found[0], found[1]


def of_the_trainer(fixture: Any) -> tuple[Counts, Counts]:
    def train(example: Any, data: list[Any], packed: bool) -> None:
        kinds = (example.StockTrainer, example.padded), (example.PackedTrainer, example.pack)
        trainer, collate = kinds[packed]
        example.train(trainer, data, collate)

    return of_an_example("trainer_policy", train, fixture)


def of_accelerate(fixture: Any) -> tuple[Counts, Counts]:
    import accelerate

    import mmpack as mp

    def train(example: Any, data: list[Any], packed: bool) -> None:
        example.accelerator = accelerate.Accelerator(cpu=True)
        pack = functools.partial(mp.collate, share_prefix=True)
        kinds = (example.padded, example.stock_loss), (pack, example.packed_loss)
        example.train(data, *kinds[packed])

    return of_an_example("accelerate_policy", train, fixture)


def of_lightning(fixture: Any) -> tuple[Counts, Counts]:
    import mmpack as mp

    def train(example: Any, data: list[Any], packed: bool) -> None:
        pack = functools.partial(mp.collate, share_prefix=True)
        kinds = (example.Stock, example.padded), (example.Packed, pack)
        module, collate = kinds[packed]
        example.train(module(), data, collate)

    return of_an_example("lightning_policy", train, fixture)


# -- frameworks --------------------------------------------------------------------------------------------------------


def of_trl(fixture: Any) -> tuple[Counts, Counts]:
    """A real trainer, its loss pass over what its `rollout_func` returned."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    from mmpack.adapters.trl import MmpackGRPO
    from mmpack.demo.tiny_models import tiny_model

    class Packed(MmpackGRPO, GRPOTrainer):
        pass

    numbers = list(dict.fromkeys(number for number, _, _ in fixture.rows))
    prompts = [
        {
            "prompt": [{"role": "user", "content": fixture.messages[n][0]["content"][-1]["text"]}],
            "images": fixture.pictures[n],
        }
        for n in numbers
    ]

    def returned(asked: list[Any], trainer: Any) -> dict[str, Any]:
        encoded = fixture.hf_processor.apply_chat_template(
            [fixture.messages[number] for number, _, _ in fixture.rows],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
        )
        return {
            "prompt_ids": encoded["input_ids"],
            "completion_ids": [response for _, response, _ in fixture.rows],
            "logprobs": [logprobs for _, _, logprobs in fixture.rows],
        }

    found = []
    for kind in (GRPOTrainer, Packed):
        with tempfile.TemporaryDirectory() as folder:
            trainer = kind(
                model=tiny_model("qwen2_5_vl"),
                reward_funcs=lambda completion_ids, **columns: [
                    float(len(c)) for c in completion_ids
                ],
                rollout_func=returned,
                args=GRPOConfig(
                    folder,
                    per_device_train_batch_size=len(fixture.rows),
                    num_generations=RESPONSES,
                    max_completion_length=16,
                    use_cpu=True,
                    bf16=False,
                    report_to=[],
                ),
                train_dataset=Dataset.from_list(prompts),
                processing_class=fixture.hf_processor,
            )
            trainer.current_gradient_accumulation_steps = 1
            trainer.model.train()
            rows = [row for row in prompts for _ in range(RESPONSES)]
            batch = trainer._generate_and_score_completions(rows)
            count = watched(
                trainer.model,
                lambda trainer=trainer, batch=batch: trainer.compute_loss(trainer.model, batch),
            )
        found.append(count)
    return found[0], found[1]


def of_verl(fixture: Any) -> tuple[Counts, Counts]:
    """Its FSDP engine, one micro-batch with its own loss, padded (`use_remove_padding` needs flash-attn)."""
    from conformance.verl_cpu import make_engine, start
    from matrix.verl_trace import data_proto

    from mmpack.adapters.verl import use
    from mmpack.demo.tiny_models import tiny_model

    start()
    from verl.utils import tensordict_utils as tu
    from verl.workers.utils.padding import left_right_2_no_padding

    with tempfile.TemporaryDirectory() as folder:
        tiny_model("qwen2_5_vl").save_pretrained(folder)
        engine = make_engine(Path(folder))
        data = left_right_2_no_padding(data_proto(fixture).to_tensordict())
        tu.assign_non_tensor(
            data,
            temperature=1.0,
            calculate_entropy=False,
            use_dynamic_bsz=False,
            micro_batch_size_per_gpu=len(fixture.rows),
            use_remove_padding=False,
            use_fused_kernels=False,
        )

        def step() -> None:
            with engine.eval_mode():
                engine.infer_batch(data)

        stock = watched(engine.module, step)
        with use(engine):
            return stock, watched(engine.module, step)


def of_openrlhf(fixture: Any) -> tuple[Counts, Counts]:
    """Its Actor, called as its training pass calls it."""
    where = ROOT / "tests" / "support" / "openrlhf_parts.py"
    from matrix.openrlhf_trace import experience

    from mmpack.adapters.openrlhf import use
    from mmpack.demo.tiny_models import tiny_model

    trainer = runpy.run_path(str(where))["import_trainer"]()
    from openrlhf.utils.vlm_utils import merge_mm_train_inputs

    with tempfile.TemporaryDirectory() as folder:
        tiny_model("qwen2_5_vl").save_pretrained(folder)
        actor = trainer.Actor(folder, attn_implementation="sdpa", temperature=1.0)
    actor.model.float()
    rows = experience(fixture)

    def step() -> None:
        logprobs, _ = actor(
            rows.sequences,
            rows.action_mask,
            attention_mask=rows.attention_mask,
            return_output=True,
            ring_attn_group=None,
            **merge_mm_train_inputs(rows.mm_train_inputs, "cpu"),
        )
        logprobs.sum().backward()

    stock = watched(actor.model, step)
    with use(actor):
        return stock, watched(actor.model, step)


def of_unirl(fixture: Any) -> tuple[Counts, Counts]:
    """Its train stack, made of its Geo3K recipe: micro-batches of 4, gradients, FSDP2."""
    from omegaconf import OmegaConf
    from unirl.models.qwen_vl.conditions import QwenVLARConditions

    from mmpack.demo.tiny_models import tiny_model

    steps = SimpleNamespace(**runpy.run_path(str(ROOT / "tests" / "support" / "unirl_steps.py")))
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    prompts = [
        fixture.hf_processor.apply_chat_template(
            fixture.messages[number],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
        )
        for number, _, _ in fixture.rows
    ]
    responses = [response for _, response, _ in fixture.rows]
    names = [name for name, _ in fixture.ids]
    part = steps.part_of(prompts, responses, QwenVLARConditions, names=names)
    cfg = OmegaConf.load(steps.RECIPE)
    cfg.stack._target_ = "mmpack.adapters.unirl.Stack"
    with tempfile.TemporaryDirectory() as folder:
        tiny_model("qwen2_5_vl").save_pretrained(folder)
        fixture.hf_processor.save_pretrained(folder)
        settings = {"model_precision": "fp32", "attn_implementation": "sdpa"}
        cfg.bundle.config |= settings | {"pretrained_model_ckpt_path": folder}
        cfg.backend.fsdp_cfg.param_dtype = "fp32"
        made = steps.roles(cfg)
    model = made.bundle.transformer
    own = watched(model, lambda: steps.step(made.stack, part))
    made.stack.replay.stop()
    stock = watched(model, lambda: steps.step(made.stack, part))
    torch.distributed.destroy_process_group()
    return stock, own


# name -> how it is run, whose version counts, how the table names it
RUNNERS: dict[str, tuple[Callable[[Any], tuple[Counts, Counts]], str, str]] = {
    "trl": (of_trl, "trl", "TRL's `GRPOTrainer`, its loss pass"),
    "trainer": (of_the_trainer, "transformers", "transformers' `Trainer`"),
    "accelerate": (of_accelerate, "accelerate", "accelerate loop"),
    "lightning": (of_lightning, "lightning", "Lightning module"),
    "verl": (of_verl, "verl", "verl's FSDP engine, padded (`use_remove_padding=False`)"),
    "openrlhf": (of_openrlhf, "openrlhf", "OpenRLHF's `Actor`"),
    "unirl": (of_unirl, "unirl", "UniRL's `TrainStack`, a step of its Geo3K recipe"),
}


if __name__ == "__main__":
    sys.exit(main())
