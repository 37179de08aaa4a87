"""Rows as OpenRLHF, vime and slime read them, in train.jsonl beside this file: `python data.py`.

A row has the prompt with one `<image>` per picture, the pictures as base64, and what the reward is told.
"""

import base64
import io
import json
from pathlib import Path

from mmpack.demo import load_exercises

HERE = Path(__file__).parent


def row(exercise):  # yours
    pictures = []
    for image in exercise.images:
        file = io.BytesIO()
        image.save(file, "PNG")
        encoded = base64.b64encode(file.getvalue()).decode()
        pictures.append(f"data:image/png;base64,{encoded}")
    choices = "\n".join(f"{a}. {c}" for a, c in zip("ABCD", exercise.choices, strict=True))
    text = f"{'<image>' * len(pictures)}{exercise.prompt}\n{choices}\nAnswer with the letter only."
    return {"input": text, "images": pictures, "label": exercise.answer_letter}


lines = [json.dumps(row(exercise)) for exercise in load_exercises()]
(HERE / "train.jsonl").write_text("\n".join(lines) + "\n")
print(f"{HERE / 'train.jsonl'}: {len(lines)} rows")
