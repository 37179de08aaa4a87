"""`mmpack init FRAMEWORK [DIR]`: a loop to start from, as files of your own."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated, Literal

import typer

from mmpack.cli.output import Result
from mmpack.errors import ArgumentError
from mmpack.files import replaced

Framework = Literal["loop", "trl", "verl", "openrlhf", "vime"]  # who runs the loop
STARTERS = Path(__file__).parent / "starters"
NEXT = {  # what to do with the files in the folder `{}`
    "loop": "pip install 'mmpack[smoke]', then: python {}/train.py",
    "trl": "pip install 'mmpack[smoke,trl]', then: python {}/train.py",
    "verl": "pip install 'mmpack[smoke,verl,data]', set your model in {0}/grpo.yaml, then: bash {0}/run.sh",
    "openrlhf": "pip install 'mmpack[smoke,openrlhf]' and vLLM, then: MODEL=… bash {}/run.sh",
    "vime": "pip install 'mmpack[smoke]' where vime is, then: VIME_DIR=… MEGATRON_DIR=… MODEL=… bash {}/run.sh",
}


def command(
    framework: Framework,
    folder: Annotated[Path, typer.Argument()] = Path(),
) -> Result:
    """Write the files of a small training loop to start from. Never overwrites a file.

    Args:
        framework [FRAMEWORK]: loop (plain PyTorch), trl (GRPOTrainer), verl (a config), openrlhf or vime (a
            command).
        folder [DIR]: Where the files go; made if it is not there.

    Examples:
        mmpack init loop
        mmpack init trl experiment
    """
    folders = (framework, "rows") if framework in ("openrlhf", "vime") else (framework,)
    found = (p for name in folders for p in (STARTERS / name).iterdir() if p.is_file())
    sources = sorted(found, key=lambda path: path.name)
    targets = [folder / source.name for source in sources]
    there = [target for target in targets if target.exists() or target.is_symlink()]
    if there:
        raise ArgumentError(
            f"init: {str(there[0])!r:.120} is there already. Fix: name another DIR, or move the file away"
        )
    if folder.exists() and not folder.is_dir():
        raise ArgumentError(f"init: {str(folder)!r:.120} is no folder. Fix: name another DIR")
    folder.mkdir(parents=True, exist_ok=True)
    for source, target in zip(sources, targets, strict=True):
        with source.open("rb") as text, replaced(target, "init", ArgumentError) as file:
            shutil.copyfileobj(text, file)
    step = NEXT[framework].format(folder)
    names = [str(target) for target in targets]
    return Result({"files": names, "next": step}, [f"wrote {', '.join(names)}", f"next: {step}"])
