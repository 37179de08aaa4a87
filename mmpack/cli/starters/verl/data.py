"""Rows as verl reads them, in train.parquet and test.parquet beside this file: `python data.py`.

A row has the prompt with one `<image>` per picture, the pictures, and what the reward is told.
"""

import io
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from mmpack.demo import load_exercises

HERE = Path(__file__).parent


def row(exercise, number):  # yours
    pictures = []
    for image in exercise.images:
        file = io.BytesIO()
        image.save(file, "PNG")
        pictures.append({"bytes": file.getvalue()})
    choices = "\n".join(f"{a}. {c}" for a, c in zip("ABCD", exercise.choices, strict=True))
    text = f"{'<image>' * len(pictures)}{exercise.prompt}\n{choices}\nAnswer with the letter only."
    return {
        "data_source": "drawn",
        "prompt": [{"role": "user", "content": text}],
        "images": pictures,
        "reward_model": {"style": "rule", "ground_truth": exercise.answer_letter},
        "extra_info": {"index": number},
    }


rows = [row(exercise, k) for k, exercise in enumerate(load_exercises())]
for name, some in (("train", rows[:-4]), ("test", rows[-4:])):
    pq.write_table(pa.Table.from_pylist(some), HERE / f"{name}.parquet")
    print(f"{HERE / name}.parquet: {len(some)} rows")
