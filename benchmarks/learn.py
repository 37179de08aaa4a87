"""A whole GRPO run in TRL's own trainer, stock and with `MmpackGRPO`: does it learn the same, and in what time?

    python benchmarks/learn.py [--trainer both] [--seeds 0 1 2] [--steps 60] [--parts FOLDER]

The policy is a small Qwen2.5-VL of random weights, and its start the same for all runs: supervised steps teach it four
forms of a response of tens of tokens to the drawn problems, each with a choice at random; GRPO, whose reward is 1 for
the right choice, must find which. Trainers get the same arguments; all that is not named here is TRL's default.

Each run is a process of its own and leaves a file in FOLDER; a run whose file is there is not run again, so that a
command that was cut off goes on. Runs for the curves share a GPU. Seconds are those of one more run of each trainer,
alone on its GPU: medians over the steps between two generations, after the first ones. The device is waited for before
and after each part of a step. Once no run is missing they become one report.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import re
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import datasets
import gpu
import torch
import transformers
import trl

import mmpack as mp
from benchmarks.step.report import short, versions
from mmpack.adapters.transformers import attach, packed_logprobs
from mmpack.adapters.trl import MmpackGRPO
from mmpack.demo import load_exercises, qwen_vl_processor, tiny_model
from mmpack.demo.datasets import Exercise
from mmpack.demo.tiny_models import QWEN2_TEXT, TOWER, rope, whole
from mmpack.errors import installed_version
from mmpack.files import write_text

TRAINERS = ("stock", "mmpack")
STAGES = ("generation", "old", "reference", "train")
ALONE = "alone"  # in place of a seed
SETTINGS = (
    "pixels",
    "problems",
    "prompts",
    "rows",
    "iterations",
    "rate",
    "beta",
    "supervised",
    "steps",
)
WARM_UP = 2  # generations that are not timed
GROUP = 8
# what the supervised steps teach, `tiny` the first alone; the reward reads the last letter
FORMS = (
    "Answer: {letter}",
    "The choices are {choices}. By the figure, only one of them can be right. Answer: {letter}",
    "The problem says: {problem} The labels of the figure give what is known. I compare it with {choices}, which "
    "leaves one. Answer: {letter}",
    "First I read the lengths and angles in the figure, then what is asked: {problem} Working it out step by step "
    "gives one of {choices}. Answer: {letter}",
    "Let me look at the figure: its points, its lines, and the numbers beside them. {problem} The rule that holds "
    "here turns the numbers into one equation, and solving it gives a value. Of {choices} I take it. Answer: {letter}",
)


class Packed(MmpackGRPO, trl.GRPOTrainer):
    pass


def main() -> None:
    args = arguments()
    args.parts.mkdir(parents=True, exist_ok=True)
    if args.run:
        return run(args.run[0], args.run[1], args)
    wanted = TRAINERS if args.trainer == "both" else (args.trainer,)
    if not start_folder(args).exists():
        make_start(args)
    curves = [(t, str(seed)) for seed in args.seeds for t in wanted]
    gpus = torch.cuda.device_count()
    in_processes(curves, args, at_once=len(curves) if gpus else 1)
    in_processes([(t, ALONE) for t in wanted], args, at_once=max(gpus, 1))
    parts = {k: read(k, args) for k in [*curves, *((t, ALONE) for t in wanted)]}
    lacking = [part_file(*k, args).name for k, part in parts.items() if part is None]
    if lacking or wanted != TRAINERS:
        sys.exit(
            f"learn: no report without {', '.join(lacking) or 'both trainers'}. Fix: call again"
        )
    report = joined(parts, args)
    for row in report["rows"]:
        print(json.dumps(row))
    if args.out:
        write_text(args.out, json.dumps(report, indent=1) + "\n")


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__)
    option = parser.add_argument
    option("--trainer", choices=(*TRAINERS, "both"), default="both")
    option("--seeds", type=int, nargs="+", default=[0, 1, 2])
    option("--steps", type=int, default=60, help="optimizer steps of a curve")
    option("--alone-steps", type=int, default=16, help="of a run that is timed")
    option("--supervised", type=int, default=100, help="steps before GRPO")
    option("--model", choices=("tiny", "94m"), default="94m" if cuda else "tiny")
    option("--pixels", type=int, nargs=2, default=(336**2, 504**2) if cuda else (28**2, 6 * 28**2))
    option("--problems", type=int, default=16)
    option("--prompts", type=int, default=8, help=f"of a generation, {GROUP} responses each")
    option("--rows", type=int, default=8, help="of a micro-batch")
    option("--iterations", type=int, default=2, help="optimizer steps of a generation")
    option("--supervised-rate", type=float, default=1e-3)
    option("--rate", type=float, default=5e-4, help="of GRPO")
    option("--beta", type=float, default=0.01, help="of the divergence from the start")
    option("--parts", type=Path, default=Path("build/learn"))
    option("--out", type=Path, default=gpu.RESULTS / "learn.json" if cuda else None)
    option("--run", nargs=2, metavar=("TRAINER", "SEED"), help=argparse.SUPPRESS)
    return parser.parse_args(words)


# ---------------------------------------------------------------- runs


def start_folder(args: argparse.Namespace) -> Path:
    return Path(args.parts) / f"start-{args.model}"


def part_file(trainer: str, seed: str, args: argparse.Namespace) -> Path:
    return Path(args.parts) / f"{trainer}-{seed}.json"


def read(key: tuple[str, str], args: argparse.Namespace) -> dict[str, Any] | None:
    """A run of at least as many steps as asked for, cut to these."""
    path, steps = part_file(*key, args), args.alone_steps if key[1] == ALONE else args.steps
    part = json.loads(path.read_text()) if path.exists() else {"steps": []}
    if len(part["steps"]) < steps:
        return None
    return part | {"steps": part["steps"][:steps]}


def in_processes(keys: list[tuple[str, str]], args: argparse.Namespace, at_once: int) -> None:
    """Those that are missing, spread over the GPUs."""
    missing = [key for key in keys if read(key, args) is None]
    gpus = torch.cuda.device_count()

    def one(numbered: tuple[int, tuple[str, str]]) -> None:
        number, key = numbered
        card = {"CUDA_VISIBLE_DEVICES": str(number % gpus)} if gpus else {}
        command = [sys.executable, __file__, *sys.argv[1:], "--run", *key]
        subprocess.run(command, env=os.environ | card, check=False)

    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(one, enumerate(missing)))


def run(name: str, seed: str, args: argparse.Namespace) -> None:
    """One run. Its file is written at every step: what was cut off is of use to a command with fewer `--steps`."""
    alone = seed == ALONE
    trainer, clock = build(
        name, 0 if alone else int(seed), args.alone_steps if alone else args.steps, args
    )
    cuda = torch.cuda.is_available()
    packages = ("trl", "datasets", "accelerate")
    made = {"trainer": name, "seed": seed, "parameters": trainer.model.num_parameters()}
    made |= gpu.machine() if cuda else {"device": "CPU", "versions": versions()}
    made["versions"] |= {p: installed_version(p) for p in packages}

    def save() -> None:
        stats = getattr(trainer, "mmpack_stats", None)
        counted = {} if stats is None else {"stats": vars(stats)}
        write_text(part_file(name, seed, args), json.dumps(made | counted | {"steps": clock.steps}))

    clock.each_step = save
    trainer.train()


def build(name: str, seed: int, steps: int, args: argparse.Namespace) -> tuple[Any, Clock]:
    """A trainer, stock or packed, and what its steps take."""
    cuda = torch.cuda.is_available()
    processor = processor_of(args)
    rows = [
        {
            "prompt": [{"role": "user", "content": question(e)}],
            "images": list(e.images),
            "answer": e.answer_letter,
        }
        for e in problems(args)
    ]
    clock = Clock()

    def reward(completions: Any, answer: list[str], **columns: Any) -> list[float]:
        said = [c[0]["content"] for c in completions]
        found = [float(right(text, letter)) for text, letter in zip(said, answer, strict=True)]
        clock.reward = statistics.fmean(found)
        return found

    policy = transformers.AutoModelForImageTextToText.from_pretrained(start_folder(args))
    config = trl.GRPOConfig(
        output_dir=str(args.parts / "trl"),
        seed=seed,
        max_steps=steps,
        per_device_train_batch_size=args.rows,
        gradient_accumulation_steps=args.prompts * GROUP // args.rows,
        num_generations=GROUP,
        num_iterations=args.iterations,
        max_completion_length=8 if args.model == "tiny" else 96,
        beta=args.beta,
        learning_rate=args.rate,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=not cuda,
        bf16=cuda,
    )
    trainer = (trl.GRPOTrainer if name == "stock" else Packed)(
        model=policy,
        reward_funcs=reward,
        args=config,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=processor,
        callbacks=[clock],
    )
    clock.watch(trainer)
    return trainer, clock


class Clock(transformers.TrainerCallback):
    """Of each optimizer step: its reward, what TRL logs, and seconds by stage, `rest` being all others."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []
        self.reward = math.nan
        self.each_step: Callable[[], None] = lambda: None
        self.spent: Counter[str] = Counter()

    def watch(self, trainer: Any) -> None:
        """Put clocks around the methods of this trainer that make up its step, whichever class they are of."""

        def stage(model: Any, *args: Any, **kwargs: Any) -> str | None:
            if torch.is_grad_enabled():
                return None  # a part of training_step
            return "reference" if model is trainer.ref_model else "old"

        for name, of in (
            ("_generate", lambda *args, **kwargs: "generation"),
            ("_prepare_inputs", lambda *args, **kwargs: "inputs"),
            ("_get_per_token_logps_and_entropies", stage),
            ("training_step", lambda *args, **kwargs: "micro-batches"),
        ):
            setattr(trainer, name, self.around(getattr(trainer, name), of))

    def around(self, call: Callable[..., Any], of: Callable[..., str | None]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            stage = of(*args, **kwargs)
            if stage is None:
                return call(*args, **kwargs)
            start = now()
            out = call(*args, **kwargs)
            self.spent[stage] += now() - start
            return out

        return timed

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.began = now()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """After each step, its optimizer included."""
        if "loss" not in logs:
            return  # the summary of the run
        spent, ended = self.spent, now()
        spent["train"] = spent["micro-batches"] - spent["inputs"]  # forward and backward
        stages = {name: spent[name] for name in STAGES}
        whole = ended - self.began
        said = {
            name: float(logs[name])
            for name in ("loss", "grad_norm", "completions/mean_length")
            if name in logs
        }
        row = {
            "reward": self.reward,
            **said,
            **stages,
            "rest": whole - sum(stages.values()),
            "step": whole,
        }
        self.steps.append(short(row))
        self.each_step()
        self.spent, self.began = Counter(), now()


def now() -> float:
    """Seconds, after the device has done all it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


# ---------------------------------------------------------------- problems and the start


def processor_of(args: argparse.Namespace) -> Any:
    return qwen_vl_processor(min_pixels=args.pixels[0], max_pixels=args.pixels[1])


def problems(args: argparse.Namespace) -> list[Exercise]:
    """Drawn problems, choices turned so that each letter is right equally often: none is worth more than 0.25."""
    found = []
    for k, e in enumerate(load_exercises(limit=args.problems)):
        at = (e.choices.index(e.answer) - k) % 4
        found.append(
            replace(e, choices=e.choices[at:] + e.choices[:at], answer_letter="ABCD"[k % 4])
        )
    return found


def question(exercise: Exercise) -> str:
    choices = (
        f"{letter}. {choice}" for letter, choice in zip("ABCD", exercise.choices, strict=True)
    )
    return f"{exercise.prompt}\n{'  '.join(choices)}\nGive your reasons, then the letter of the right choice."


def response(exercise: Exercise, form: str, letter: str) -> str:
    choices = ", ".join(exercise.choices)
    return form.format(problem=exercise.prompt, choices=choices, letter=letter)


def right(text: str, letter: str) -> bool:
    return re.search(r"Answer: [A-D]$", text) is not None and text[-1] == letter


def policy(size: str) -> Any:
    """Random weights of seed 0, float32, on the CPU. 94m: 58 M of them are the vocabulary's, whose head is tied."""
    if size == "tiny":
        return tiny_model("qwen2_5_vl")
    text = {
        "hidden_size": 384,
        "intermediate_size": 1024,
        "num_hidden_layers": 12,
        "num_attention_heads": 6,
    }
    tower = {
        "depth": 8,
        "hidden_size": 384,
        "intermediate_size": 1024,
        "num_heads": 6,
        "out_hidden_size": 384,
    }
    more = {"fullatt_block_indexes": [3, 7], "tokens_per_second": 2}
    config = whole(QWEN2_TEXT | text | rope(1e6, [8, 12, 12]), TOWER | tower | more)
    torch.manual_seed(0)
    return transformers.Qwen2_5_VLForConditionalGeneration(transformers.Qwen2_5_VLConfig(**config))


def make_start(args: argparse.Namespace) -> None:
    """Supervised steps over all problems, each in one of the forms, with a choice at random; then a checkpoint."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, processor, draw = (
        policy(args.model).to(device).train(),
        processor_of(args),
        random.Random(0),
    )
    wrapped, exercises = mp.wrap_processor(processor), problems(args)
    optimizer = torch.optim.AdamW(
        model.parameters(), args.supervised_rate, (0.9, 0.95), weight_decay=0.0
    )
    forms = FORMS[:1] if args.model == "tiny" else FORMS[1:]
    for k in range(args.supervised):
        samples = []
        for e in exercises:
            text = response(e, draw.choice(forms), draw.choice("ABCD"))
            pictures = [{"type": "image", "image": image} for image in e.images]
            content = [*pictures, {"type": "text", "text": question(e)}]
            ids = processor.tokenizer(f"{text}<|im_end|>")["input_ids"]
            samples.append(
                wrapped([{"role": "user", "content": content}], ids, sample_id=e.exercise_id)
            )
        with (
            attach(model),
            torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"),
        ):
            loss = -packed_logprobs(model, mp.pack(samples).to(device)).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if k % 10 == 9:
            print(f"supervised step {k + 1}: loss {loss.item():.3f}", file=sys.stderr, flush=True)
    model.save_pretrained(start_folder(args))
    processor.save_pretrained(start_folder(args))


# ---------------------------------------------------------------- the report


def joined(
    parts: dict[tuple[str, str], dict[str, Any]], args: argparse.Namespace
) -> dict[str, Any]:
    """Rows of the page, and the curves: a reward of each generation, by trainer and seed."""
    alone = {t: parts[t, ALONE] for t in TRAINERS}
    rows = [{"section": "seconds a step"} | seconds_of(part, args) for part in alone.values()]
    curves = [
        {"trainer": t, "seed": s, "reward": [x["reward"] for x in part["steps"] if x["generation"]]}
        for (t, s), part in parts.items()
        if s != ALONE
    ]
    for curve in curves:
        names = {
            "section": "reward of each run",
            "trainer": curve["trainer"],
            "seed": curve["seed"],
        }
        rows.append(names | summary(curve["reward"]))
    for what in ("whole_run", "last_quarter"):
        rows.append({"section": "both trainers"} | compared(what, rows))
    first = alone["stock"]
    about = {name: first[name] for name in ("device", "versions")}
    report = {
        "op": "learn",
        "command": gpu.command(),
        **about,
        "floors": {},
        "rows": [short(r) for r in rows],
    }
    settings = {name: getattr(args, name) for name in SETTINGS}
    return report | {"parameters": first["parameters"], "settings": settings, "curves": curves}


def seconds_of(part: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """Seconds a step, by stage: medians over generations, of the mean of the steps that each is good for."""
    steps = part["steps"]
    rounds = [steps[k : k + args.iterations] for k in range(0, len(steps), args.iterations)][
        WARM_UP:
    ]
    row: dict[str, Any] = {"trainer": part["trainer"], "steps": len(rounds) * args.iterations}
    for name in ("step", *STAGES, "rest"):
        row[name] = statistics.median(statistics.fmean(s[name] for s in own) for own in rounds)
    stats = part.get("stats")
    if stats:
        row |= {f"{n}_of_TRL": stats[n] / stats[f"{n}_stock"] for n in ("tokens", "patches")}
    return row


def summary(rewards: Sequence[float]) -> dict[str, float]:
    quarter = max(len(rewards) // 4, 1)
    parts = {
        "first_quarter": rewards[:quarter],
        "last_quarter": rewards[-quarter:],
        "whole_run": rewards,
    }
    return {name: statistics.fmean(values) for name, values in parts.items()}


def compared(what: str, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Means over seeds, and whether they differ by no more than two standard errors of their difference."""
    own = {
        t: [r[what] for r in rows if r["section"] == "reward of each run" and r["trainer"] == t]
        for t in TRAINERS
    }
    stock, packed = (statistics.fmean(values) for values in own.values())
    errors = [
        statistics.stdev(v) / math.sqrt(len(v)) if len(v) > 1 else math.nan for v in own.values()
    ]
    row = {
        "mean_reward_of": what.replace("_", " "),
        "stock": stock,
        "mmpack": packed,
        "difference": packed - stock,
    }
    bound = 2 * math.hypot(*errors)
    return row | {"two_standard_errors": bound, "within": abs(packed - stock) <= bound}


if __name__ == "__main__":
    main()
