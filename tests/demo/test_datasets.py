"""Readers of problems: three layouts to the same problems, and one line for whatever is wrong with a file."""

import io
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from mmpack.demo.datasets import load_exercises
from mmpack.errors import ArgumentError, MmpackError, TraceError


def png(size=(30, 20), colour=(10, 200, 30), mode="RGB") -> bytes:
    buffer = io.BytesIO()
    Image.new(mode, size, colour).save(buffer, "PNG")
    return buffer.getvalue()


RECORD = {"problem_text": "Find x.", "choices": ["3", "4", "5", "6"], "answer": "C"}


def write_problem(folder: Path, record=RECORD, **pictures: bytes) -> Path:
    folder.mkdir(parents=True)
    (folder / "data.json").write_text(record if isinstance(record, str) else json.dumps(record))
    for name, data in (pictures or {"img_diagram": png()}).items():
        (folder / f"{name}.png").write_bytes(data)
    return folder


def write_parquet(path: Path, rows: list[dict]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def row(text="<image>Find x.", answer="5", pictures=1, **change):
    cells = [{"bytes": png(colour=(i, 0, 0)), "path": f"{i}.png"} for i in range(pictures)]
    return {"images": cells, "problem": text, "answer": answer} | change


def message(*args, **kwargs) -> str:
    with pytest.raises((ArgumentError, TraceError)) as caught:
        load_exercises(*args, **kwargs)
    text = str(caught.value)
    assert "\n" not in text
    assert text.startswith("load_exercises: ")
    assert "Fix: " in text
    return text


# ---------------------------------------------------------------- what is read


def test_without_data_the_drawn_set():
    assert [p.exercise_id for p in load_exercises()] == [str(i) for i in range(1, 17)]
    assert [p.exercise_id for p in load_exercises(limit=3)] == ["1", "2", "3"]


def test_folder_in_order_of_number(tmp_path):
    for number in ("10", "2", "1"):
        write_problem(tmp_path / "train" / number)
    write_problem(tmp_path / "train" / ".hidden", record="{")
    write_problem(tmp_path / "test" / "3", {"problem_text": "Find x.", "answer": "7"})
    for folder, source in ((tmp_path, "train/1"), (tmp_path / "train", "1")):
        exercises = load_exercises(folder)
        assert [p.exercise_id for p in exercises] == ["1", "2", "10"]
        said = {(p.prompt, p.answer, p.answer_letter) for p in exercises}
        assert said == {("Find x.", "5", "C")} and exercises[0].source == source
    [bare] = load_exercises(str(tmp_path), split="test")  # without choices the answer itself
    assert (bare.answer, bare.choices, bare.answer_letter) == ("7", (), None)


def test_pictures_in_the_order_of_the_record(tmp_path):
    first, second = png((40, 20)), png((60, 20), mode="RGBA", colour=(1, 2, 3, 4))
    record = RECORD | {"images": ["b.png", "a.png"]}
    write_problem(tmp_path / "train" / "1", record, a=second, b=first)
    images = load_exercises(tmp_path)[0].images
    assert [(image.size, image.mode) for image in images] == [((40, 20), "RGB"), ((60, 20), "RGBA")]


def test_parquet_file_and_shards(tmp_path):
    rows = [
        row(answer=str(i), pictures=1 + i % 2, text="<image>" * (1 + i % 2) + f"Find {i}.")
        for i in range(40)
    ]
    one = write_parquet(tmp_path / "one.parquet", rows)
    for folder in ("shards", "hub/data"):
        write_parquet(tmp_path / folder / "train-00001-of-00002.parquet", rows[25:])
        write_parquet(tmp_path / folder / "train-00000-of-00002.parquet", rows[:25])
        write_parquet(tmp_path / folder / "test-00000-of-00001.parquet", [row(answer="test")])
    for data in (one, tmp_path / "shards", str(tmp_path / "hub")):
        exercises = load_exercises(data)
        assert [p.exercise_id for p in exercises] == [str(i) for i in range(40)]
        assert [p.answer for p in exercises] == [str(i) for i in range(40)]
        assert [p.prompt for p in exercises] == [f"Find {i}." for i in range(40)]
        assert [len(p.images) for p in exercises] == [1 + i % 2 for i in range(40)]
        assert exercises[1].images[1].getpixel((0, 0)) == (1, 0, 0)
    assert load_exercises(tmp_path / "shards", split="test")[0].answer == "test"
    assert len(load_exercises(one, limit=17)) == 17


def test_parquet_cell_with_a_path_alone(tmp_path):
    (tmp_path / "0.png").write_bytes(png((50, 60)))
    spaced = row(" <image>\n<image> In $x$,\nfind y. ", pictures=2)
    cell = {"bytes": None, "path": "0.png"}
    path = write_parquet(tmp_path / "p.parquet", [spaced, row(images=[cell])])
    a, b = load_exercises(path)
    assert a.prompt == "In $x$,\nfind y." and b.images[0].size == (50, 60)


def test_hub(monkeypatch):
    import datasets

    features = datasets.Features(
        {
            "images": datasets.List(datasets.Image()),
            "problem": datasets.Value("string"),
            "answer": datasets.Value("string"),
        }
    )
    rows = [row(answer="1"), row("<image><image>Find y.", "2", pictures=2)]
    table = datasets.Dataset.from_list(rows, features=features)
    asked = []

    def load_dataset(name, split):
        asked.append((name, split))
        return table

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    exercises = load_exercises("someone/geometry", split="test")
    assert asked == [("someone/geometry", "test")]
    assert [(p.exercise_id, p.prompt, p.answer, len(p.images)) for p in exercises] == [
        ("0", "Find x.", "1", 1),
        ("1", "Find y.", "2", 2),
    ]
    table = table.remove_columns("answer")
    assert "someone/geometry: field 'answer' is not a column" in message("someone/geometry")
    monkeypatch.undo()  # out of reach
    assert "there is no folder nobody/no-such-set" in message("nobody/no-such-set")


def test_real_problems(geo3k_dir):
    exercises = load_exercises(geo3k_dir)
    assert [p.exercise_id for p in exercises] == ["11", "12", "13", "14", "16", "17", "18"]
    assert [p.answer for p in exercises] == ["80", "13", "9", "48", "10", "120", "22"]
    for exercise in exercises:
        record = json.loads((geo3k_dir / "train" / exercise.exercise_id / "data.json").read_text())
        assert exercise.images[0].size == (record["img_width"], record["img_height"])
        assert exercise.prompt == record["problem_text"]


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    "wrong", [{"limit": "4"}, {"limit": 0}, {"data": 3}, {"split": ".."}, {"split": "a/b"}]
)
def test_arguments(wrong):
    assert next(iter(wrong)) in message(**wrong)


def test_data_that_is_nowhere(tmp_path):
    assert "there is no" in message(tmp_path / "nowhere")
    assert "there is no 'geometry3k'" in message("geometry3k")
    other = tmp_path / "problems.csv"
    other.write_text("a,b")
    assert "problems.csv is not a .parquet file" in message(other)


def test_empty_sets(tmp_path):
    assert "neither train/<id>/data.json nor train-*.parquet, but nothing" in message(tmp_path)
    (tmp_path / "train").mkdir()
    assert "holds no problem in split 'train'" in message(tmp_path)
    empty = pa.schema(
        [("images", pa.list_(pa.binary())), ("problem", pa.string()), ("answer", pa.string())]
    )
    pq.write_table(empty.empty_table(), tmp_path / "empty.parquet")
    assert "holds no problem" in message(tmp_path / "empty.parquet")
    assert "but empty.parquet" in message(tmp_path, split="test")


@pytest.mark.parametrize(
    ("record", "part"),
    [
        ("", "is not JSON"),
        ("[" * 200_000, "is not JSON"),
        ("[1]", "holds a list"),
        ({"answer": "A"}, "'problem_text' is missing"),
        (RECORD | {"problem_text": 3}, "'problem_text' is a int"),
        (RECORD | {"choices": [3, 4]}, "'choices' is a list"),
        (RECORD | {"answer": "E"}, "'answer' is 'E', the choices are A, B, C, D"),
        (RECORD | {"images": []}, "'images' is empty"),
        (RECORD | {"images": ["b.png"]}, "there is no file 'b.png'"),
        (RECORD | {"images": ["a\0b"]}, "can't be read"),
        (RECORD | {"images": ["x" * 5000]}, "can't be read"),
    ],
)
def test_broken_records(tmp_path, record, part):
    folder = write_problem(tmp_path / "train" / "7", record)
    text = message(tmp_path)
    assert part in text
    assert str(folder) in text


@pytest.mark.parametrize("name", ["../../../secret.png", "/{root}/secret.png", "link.png"])
def test_pictures_outside_the_folder_are_not_opened(tmp_path, name):
    (tmp_path / "secret.png").write_bytes(png())
    name = name.replace("/{root}", str(tmp_path))
    folder = write_problem(tmp_path / "set" / "train" / "1", RECORD | {"images": [name]})
    (folder / "link.png").symlink_to(tmp_path / "secret.png")
    assert "lies outside" in message(tmp_path / "set")
    path = write_parquet(
        tmp_path / "set" / "p.parquet",
        [row(), row(images=[{"bytes": None, "path": "../secret.png"}])],
    )
    assert "lies outside" in message(path)


def test_pictures_that_are_none(tmp_path):
    data = png((300, 300))[:-40]
    write_problem(tmp_path / "train" / "7", img_diagram=data)
    bad = row(images=[{"bytes": data, "path": None}])
    path = write_parquet(tmp_path / "p.parquet", [row(), bad])
    for data, where in ((tmp_path, "7/img_diagram.png"), (path, "p.parquet row 1 images[0]")):
        text = message(data)
        assert "can't be decoded" in text and where in text


@pytest.mark.parametrize(
    ("broken", "part"),
    [
        (row(text="Find <image>x."), "has 1 <image> tokens for 1 pictures"),
        (row(text="<image>Find x.", pictures=2), "has 1 <image> tokens for 2 pictures"),
        (row(text=None), "'problem' is a NoneType"),
        (row(images=[]), "'images' is empty"),
        (row(images=[None]), "images[0] has no bytes"),
        ({"images": [], "problem": "Find x."}, "'answer' is not a column"),
    ],
)
def test_broken_rows(tmp_path, broken, part):
    path = write_parquet(tmp_path / "p.parquet", [broken])
    text = message(path)
    assert part in text
    assert "p.parquet" in text


def test_files_that_are_no_parquet(tmp_path):
    whole = write_parquet(tmp_path / "p.parquet", [row()]).read_bytes()
    for data in (b"", whole[:-20]):
        (tmp_path / "p.parquet").write_bytes(data)
        assert "p.parquet can't be read as parquet" in message(tmp_path / "p.parquet")


@given(st.lists(st.tuples(st.integers(8, 10**4), st.integers(0, 255)), min_size=1, max_size=4))
def test_any_change_of_a_picture_is_read_or_refused(tmp_path_factory, changes):
    picture = bytearray(png((40, 30)))
    for at, value in changes:
        picture[max(8, at % len(picture))] = value
    read_or_refused(tmp_path_factory.mktemp("fuzz"), RECORD, bytes(picture))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=8,
)


@given(
    st.dictionaries(st.sampled_from(["problem_text", "choices", "answer", "images"]), JSON) | JSON
)
def test_any_record_is_read_or_refused(tmp_path_factory, record):
    read_or_refused(tmp_path_factory.mktemp("fuzz"), json.dumps(record), png())


def read_or_refused(folder: Path, record, picture: bytes) -> None:
    write_problem(folder / "train" / "1", record, img_diagram=picture)
    try:
        (exercise,) = load_exercises(folder)
        assert all(np.asarray(image).size for image in exercise.images)
    except MmpackError as error:
        assert "\n" not in str(error)
    shutil.rmtree(folder)


def test_no_heavy_imports():
    code = (
        "import sys; from mmpack.demo.datasets import load_exercises; load_exercises();"
        "sys.exit(any(m in sys.modules for m in ('torch', 'transformers', 'datasets', 'pyarrow')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
