"""A whole GRPO run in TRL's own trainer, stock and with `MmpackGRPO`: does it learn the same, and in what time?

    python benchmarks/learn.py [--trainer both] [--seeds 0 1 2] [--steps 60] [--parts FOLDER]

The policy is a small Qwen2.5-VL of random weights, and its start the same for all runs: supervised steps teach it four
forms of a response of tens of tokens to the drawn problems, each with a choice at random; GRPO, whose reward is 1 for
the right choice, must find which. Trainers get the same arguments; all that is not named here is TRL's default.

Each run is a process of its own and leaves a file in FOLDER; a run whose file is there is not run again, so that a
command that was cut off goes on. Runs for the curves share the GPUs. Seconds are those of one more run of each trainer,
alone on its GPU: medians over generations, the first ones left out, of what a step takes; the device is waited for
before and after each part of it. Once no run is missing they become one report, on a machine without a GPU too.
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
from collections.abc import Callable, Mapping
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
GROUP = 8  # responses to a prompt
WARM_UP = 2  # generations that are not timed
NO_SETTING = ("trainer", "seeds", "steps", "alone_steps", "parts", "work", "out", "run")
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
        return run(*args.run, args)
    trainers = TRAINERS if args.trainer == "both" else (args.trainer,)
    curves = [(t, str(seed)) for seed in args.seeds for t in trainers]
    alone = [(t, ALONE) for t in trainers]
    gpus = torch.cuda.device_count()
    in_processes(curves, args, at_once=len(curves) if gpus else 1)
    in_processes(alone, args, at_once=max(gpus, 1))
    parts = {key: read(key, args) for key in curves + alone}
    lacking = [" ".join(key) for key, part in parts.items() if part is None]
    if lacking or trainers != TRAINERS or args.alone_steps <= WARM_UP * args.iterations:
        without = ", ".join(lacking) or "both trainers, and steps that are timed"
        sys.exit(f"learn: no report yet, without {without}. Fix: call again with these")
    report = joined(parts)
    print(*map(json.dumps, report["rows"]), sep="\n")
    if args.out:
        write_text(args.out, json.dumps(report, indent=1) + "\n")


def arguments() -> argparse.Namespace:
    cuda = torch.cuda.is_available()
    pixels = (336**2, 504**2) if cuda else (28**2, 6 * 28**2)

    def number(default: float, what: str) -> dict[str, Any]:
        return {"type": type(default), "default": default, "help": what}

    return gpu.arguments(
        "learn",
        trainer={"choices": (*TRAINERS, "both"), "default": "both"},
        seeds={"type": int, "nargs": "+", "default": [0, 1, 2]},
        steps=number(40, "optimizer steps of a curve"),
        alone_steps=number(12, "of a run that is timed"),
        model={"choices": ("tiny", "94m"), "default": "94m" if cuda else "tiny"},
        dtype={"default": "float32", "help": "of the weights; passes are in bf16 on a GPU"},
        pixels={"type": int, "nargs": 2, "default": pixels, "help": "least and most of a picture"},
        problems=number(8, "of the data set"),
        letters={"default": "ABCD", "help": "of the right choices, in turn"},
        prompts=number(8, f"of a generation, {GROUP} responses to each"),
        rows=number(8, "of a micro-batch"),
        iterations=number(2, "optimizer steps on a generation"),
        workers=number(2 if cuda else 0, "that load data"),
        supervised=number(150 if cuda else 40, "steps before GRPO"),
        supervised_rate=number(1e-3 if cuda else 3e-3, "their learning rate"),
        rate=number(5e-4 if cuda else 2e-3, "learning rate of GRPO"),
        beta=number(0.01, "of the divergence from the start"),
        parts={"type": Path, "default": Path("build/learn"), "help": "files of runs"},
        work={"type": Path, "default": Path("build/learn"), "help": "the start, and TRL's output"},
        run={"nargs": 2, "help": argparse.SUPPRESS},
    )


# ---------------------------------------------------------------- runs


def read(key: tuple[str, str], args: argparse.Namespace) -> dict[str, Any] | None:
    """A run of at least as many steps as are asked for, cut to these."""
    path = args.parts / f"{'-'.join(key)}.json"
    part = json.loads(path.read_text()) if path.exists() else {"steps": []}
    steps = args.alone_steps if key[1] == ALONE else args.steps
    return part | {"steps": part["steps"][:steps]} if len(part["steps"]) >= steps else None


def in_processes(keys: list[tuple[str, str]], args: argparse.Namespace, at_once: int) -> None:
    """Those that are missing, spread over the GPUs."""
    missing = [key for key in keys if read(key, args) is None]
    if missing and not (args.work / "start").exists():
        make_start(args)

    def one(number: int, key: tuple[str, str]) -> None:
        card = {"CUDA_VISIBLE_DEVICES": str(number % max(torch.cuda.device_count(), 1))}
        command = [sys.executable, __file__, *sys.argv[1:], "--run", *key]
        subprocess.run(command, env=os.environ | card, check=False)

    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(one, range(len(missing)), missing))


def run(name: str, seed: str, args: argparse.Namespace) -> None:
    """One run. Its file is written at every step: one that was cut off will do where fewer `--steps` are asked for."""
    alone, cuda = seed == ALONE, torch.cuda.is_available()
    steps = args.alone_steps if alone else args.steps
    trainer, clock = build(name, 0 if alone else int(seed), steps, args)
    machine = gpu.machine() if cuda else {"device": "CPU", "versions": versions()}
    machine["versions"] |= {p: installed_version(p) for p in ("trl", "datasets", "accelerate")}
    about = {"trainer": name, "seed": seed, "parameters": trainer.model.num_parameters()} | machine
    about["settings"] = {k: v for k, v in vars(args).items() if k not in NO_SETTING}

    def save() -> None:
        counted = vars(trainer.mmpack_stats) if name == "mmpack" else None
        part = about | {"counted": counted, "steps": clock.steps}
        write_text(args.parts / f"{name}-{seed}.json", json.dumps(part))

    clock.each_step = save
    trainer.train()


def build(name: str, seed: int, steps: int, args: argparse.Namespace) -> tuple[Any, Clock]:
    """A trainer, stock or packed, and the clock of its steps."""
    cuda, clock = torch.cuda.is_available(), Clock()

    def row(e: Exercise) -> dict[str, Any]:
        prompt = [{"role": "user", "content": question(e)}]
        return {"prompt": prompt, "images": list(e.images), "answer": e.answer_letter}

    def reward(completions: Any, answer: list[str], **columns: Any) -> list[float]:
        said = [re.search(r"Answer: ([A-D])$", c[0]["content"]) for c in completions]
        found = [float(m is not None and m[1] == a) for m, a in zip(said, answer, strict=True)]
        clock.reward = statistics.fmean(found)
        return found

    load = transformers.AutoModelForImageTextToText.from_pretrained
    trainer = (trl.GRPOTrainer if name == "stock" else Packed)(
        model=load(args.work / "start", dtype=args.dtype),
        reward_funcs=reward,
        train_dataset=datasets.Dataset.from_list([row(e) for e in problems(args)]),
        processing_class=processor_of(args),
        callbacks=[clock],
        args=trl.GRPOConfig(
            output_dir=str(args.work / "trl"),
            seed=seed,
            max_steps=steps,
            per_device_train_batch_size=args.rows,
            gradient_accumulation_steps=args.prompts * GROUP // args.rows,
            num_generations=GROUP,
            num_iterations=args.iterations,
            max_completion_length=8 if args.model == "tiny" else 128,
            beta=args.beta,
            learning_rate=args.rate,
            lr_scheduler_type="constant_with_warmup",  # Adam's first steps are all signs
            warmup_steps=4,
            adam_beta2=0.95,
            dataloader_num_workers=args.workers,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=not cuda,
            bf16=cuda,
        ),
    )
    clock.watch(trainer)
    return trainer, clock


class Clock(transformers.TrainerCallback):
    """Of each optimizer step: its reward, what TRL logs, and seconds by stage, `rest` being all others."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []
        self.spent: Counter[str] = Counter()
        self.reward = math.nan  # of the last generation
        self.each_step: Callable[[], None] = lambda: None

    def watch(self, trainer: Any) -> None:
        """Put clocks around the methods of this trainer that make up its step, whichever class they are of."""

        def stage(model: Any, *args: Any, **kwargs: Any) -> str:
            if torch.is_grad_enabled():
                return "loss"  # a part of training_step
            return "reference" if model is trainer.ref_model else "old"

        def always(name: str) -> Callable[..., str]:
            return lambda *args, **kwargs: name

        for name, of in {
            "_generate": always("generation"),
            "_prepare_inputs": always("inputs"),
            "_get_per_token_logps_and_entropies": stage,
            "training_step": always("micro-batches"),
        }.items():
            setattr(trainer, name, self.timed(getattr(trainer, name), of))

    def timed(self, call: Callable[..., Any], of: Callable[..., str]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = now()
            out = call(*args, **kwargs)
            self.spent[of(*args, **kwargs)] += now() - start
            return out

        return timed

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.began = now()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """After each step, its optimizer included."""
        if "grad_norm" not in logs:
            return  # the summary of the run
        spent, whole = self.spent, now() - self.began
        spent["train"] = spent["micro-batches"] - spent["inputs"]  # forward and backward
        stages = {name: spent[name] for name in STAGES}
        said = {k: v for k, v in logs.items() if k in ("loss", "grad_norm", "kl", "num_tokens")}
        said["tokens_a_response"] = logs.get("completions/mean_length")
        rest = whole - sum(stages.values())
        self.steps.append({"reward": self.reward} | said | stages | {"rest": rest, "step": whole})
        self.each_step()
        self.spent, self.began = Counter(), now()


def now() -> float:
    """Seconds, once the device has done all that it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


# ---------------------------------------------------------------- problems and the start


def processor_of(args: argparse.Namespace) -> Any:
    return qwen_vl_processor(min_pixels=args.pixels[0], max_pixels=args.pixels[1])


def problems(args: argparse.Namespace) -> list[Exercise]:
    """Drawn problems, choices turned so that their letters are right in turn: a constant one of four is worth 0.25."""
    found = []
    for k, e in enumerate(load_exercises(limit=args.problems)):
        letter = args.letters[k % len(args.letters)]
        at = (e.choices.index(e.answer) - "ABCD".index(letter)) % 4
        turned = e.choices[at:] + e.choices[:at]
        found.append(replace(e, choices=turned, answer_letter=letter))
    return found


def question(exercise: Exercise) -> str:
    choices = "  ".join(f"{a}. {c}" for a, c in zip("ABCD", exercise.choices, strict=True))
    return f"{exercise.prompt}\n{choices}\nGive your reasons, then the letter of the right choice."


def response(exercise: Exercise, form: str, letter: str) -> str:
    choices = ", ".join(exercise.choices)
    return form.format(problem=exercise.prompt, choices=choices, letter=letter)


def policy(size: str) -> Any:
    """Random weights of seed 0, float32, on the CPU. 94m: 58 M of them are the vocabulary's, whose head is tied."""
    if size == "tiny":
        return tiny_model("qwen2_5_vl")
    wide = {"hidden_size": 384, "intermediate_size": 1024}
    text = wide | {"num_hidden_layers": 12, "num_attention_heads": 6} | rope(1e6, [8, 12, 12])
    tower = wide | {"depth": 8, "num_heads": 6, "out_hidden_size": 384}
    tower |= {"fullatt_block_indexes": [3, 7], "tokens_per_second": 2}
    config = transformers.Qwen2_5_VLConfig(**whole(QWEN2_TEXT | text, TOWER | tower))
    torch.manual_seed(0)
    return transformers.Qwen2_5_VLForConditionalGeneration(config)


def make_start(args: argparse.Namespace) -> None:
    """Supervised steps over all problems, each in one of the forms, with a choice at random; then a checkpoint."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, processor = policy(args.model).to(device).train(), processor_of(args)
    wrapped, draw = mp.wrap_processor(processor), random.Random(0)
    forms = FORMS[:1] if args.model == "tiny" else FORMS[1:]

    def samples_of(e: Exercise) -> list[mp.Sample]:
        """Every form with every choice; the pixels once."""
        parts = [*({"type": "image", "image": image} for image in e.images)]
        messages = [{"role": "user", "content": [*parts, {"type": "text", "text": question(e)}]}]
        texts = [response(e, form, letter) for form in forms for letter in "ABCD"]
        ids = processor.tokenizer([f"{text}<|im_end|>" for text in texts])["input_ids"]
        made = [wrapped(messages, own, sample_id=e.exercise_id) for own in ids]
        return [replace(sample, media=made[0].media) for sample in made]

    every = [samples_of(e) for e in problems(args)]
    rate, betas = args.supervised_rate, (0.9, 0.95)
    optimizer = torch.optim.AdamW(model.parameters(), rate, betas, weight_decay=0.0)
    half = torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")
    for k in range(args.supervised):
        batch = mp.pack([draw.choice(own) for own in every]).to(device)
        with attach(model), half:
            loss = -packed_logprobs(model, batch).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if k % 10 == 9:
            print(f"supervised step {k + 1}: loss {loss.item():.3f}", file=sys.stderr, flush=True)
    model.save_pretrained(args.work / "start")
    processor.save_pretrained(args.work / "start")


# ---------------------------------------------------------------- the report


def joined(parts: Mapping[tuple[str, str], Any]) -> dict[str, Any]:
    """Rows of the page, and the curves: the reward of each generation, by trainer and seed."""
    first = parts["stock", ALONE]
    if any(part["settings"] != first["settings"] for part in parts.values()):
        sys.exit("learn: the runs have other settings than each other. Fix: name another --parts")
    about = {k: first[k] for k in ("device", "versions", "parameters", "settings")}
    curves = [
        {"trainer": t, "seed": s, "reward": [x["reward"] for x in part["steps"] if x["generation"]]}
        for (t, s), part in parts.items()
        if s != ALONE
    ]
    rows = [{"section": "seconds a step"} | seconds_of(parts[t, ALONE]) for t in TRAINERS]
    for curve in curves:
        names = {"trainer": curve["trainer"], "seed": curve["seed"]}
        rows.append({"section": "mean reward of each run"} | names | means(curve["reward"]))
    rows += [{"section": "mean reward of both"} | compared(what, rows) for what in means([0.0])]
    report = {"op": "learn", "command": gpu.command(), "floors": {}, "rows": list(map(short, rows))}
    return about | report | {"curves": curves}


def seconds_of(part: dict[str, Any]) -> dict[str, Any]:
    """Medians over generations, of a mean of the optimizer steps on each."""
    steps, size = part["steps"], part["settings"]["iterations"]
    rounds = [steps[k : k + size] for k in range(WARM_UP * size, len(steps), size)]
    row: dict[str, Any] = {"trainer": part["trainer"], "steps": len(rounds) * size}
    for name in ("step", *STAGES, "rest"):
        row[name] = statistics.median(statistics.fmean(s[name] for s in own) for own in rounds)
    if counted := part["counted"]:
        for name in ("tokens", "patches"):
            row[f"{name}_of_TRL"] = counted[name] / counted[f"{name}_stock"]
    return row


def means(rewards: list[float]) -> dict[str, float]:
    quarter = math.ceil(len(rewards) / 4)
    return {
        "first_quarter": statistics.fmean(rewards[:quarter]),
        "last_quarter": statistics.fmean(rewards[-quarter:]),
        "whole_run": statistics.fmean(rewards),
    }


def compared(what: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Means over seeds, and whether they differ by no more than two standard errors of their difference."""
    stock, packed = ([r[what] for r in rows if what in r and r["trainer"] == t] for t in TRAINERS)
    off = statistics.fmean(packed) - statistics.fmean(stock)
    spread = sum(statistics.variance(x) / len(x) for x in (stock, packed)) if len(stock) > 1 else 0
    row = {"of": what.replace("_", " "), "stock": statistics.fmean(stock)}
    row |= {"mmpack": statistics.fmean(packed), "difference": off}
    bound = 2 * math.sqrt(spread)
    return row | {"two_standard_errors": bound, "within": abs(off) <= bound}


if __name__ == "__main__":
    main()
