"""Where images of rows stand, and datasets that are loaded, split and mixed with them."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from helpers.contexts import FakeContext, catalogue, configured
from helpers.image_rows import PNG, TEXT, encoded

from posttrain.errors import DataError
from posttrain_plugins.data.images.gallery import Gallery
from posttrain_plugins.data.images.image import Image
from posttrain_plugins.data.images.parts import placed, taken
from posttrain_plugins.data.load import run
from posttrain_plugins.data.rows import read_rows

IMAGE = {"type": "image"}


def text(value: str) -> dict[str, str]:
    return {"type": "text", "text": value}


@pytest.fixture
def gallery(tmp_path: Path) -> Gallery:
    folder = tmp_path / "source" / "pictures"
    folder.mkdir(parents=True)
    (folder / "one.png").write_bytes(PNG)
    return Gallery(tmp_path / "store", tmp_path / "source", folder)


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def answer(content: Any = "yes") -> dict[str, Any]:
    return {"role": "assistant", "content": content}


@pytest.mark.parametrize(
    "content, found",
    [
        ("see?", [IMAGE, IMAGE, text("see?")]),
        ([text("see?")], [IMAGE, IMAGE, text("see?")]),
        ([text("a "), IMAGE, text(" b "), IMAGE], [text("a "), IMAGE, text(" b "), IMAGE]),
        ("<image>\nsee <image>?", [IMAGE, text("\nsee "), IMAGE, text("?")]),
    ],
)
def test_where_images_stand(content: Any, found: Any) -> None:
    """Parts as they are; else where the text says `<image>`; else before the first turn of the user."""
    row = placed({"prompt": [{"role": "system", "content": "s"}, user(content)], "images": ["a", "b"]})
    assert row["prompt"] == [{"role": "system", "content": [text("s")]}, user(found)]
    assert row["images"] == ["a", "b"]


def test_images_in_the_messages_themselves(gallery: Gallery) -> None:
    """As `transformers` and OpenAI write them; the row names them in the order of the parts."""
    other = encoded(seed=1)
    address = f"data:image/png;base64,{base64.b64encode(other).decode()}"
    row = {
        "messages": [
            user(
                [
                    {"type": "image_url", "image_url": {"url": address}},
                    text("and"),
                    {"type": "image", "image": PNG},
                ]
            ),
            answer(),
            user([text("then"), IMAGE]),
            answer(),
        ],
        "image": {"bytes": encoded(seed=2), "path": None},
    }
    found = placed(taken(row, gallery))
    assert found["images"] == [gallery.take(each) for each in (other, PNG, encoded(seed=2))]
    assert [message["content"] for message in found["messages"]] == [
        [IMAGE, text("and"), IMAGE],
        [text("yes")],
        [text("then"), IMAGE],
        [text("yes")],
    ]
    assert "image" not in found


def test_rows_without_images_beside_others() -> None:
    """Their column is empty; texts become parts there too, as templates of these models may take nothing else."""
    row = placed(taken({"messages": [user("hi"), answer()], "images": None}, Gallery(Path())))
    assert row == {"messages": [user([text("hi")]), answer([text("yes")])], "images": []}


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [user([IMAGE, text("?")])], "images": ["a", "b"]},
        {"prompt": [user([IMAGE, IMAGE])], "images": ["a"]},
        {"prompt": [user([IMAGE])]},
        {"prompt": [user("<image>?")], "images": ["a", "b"]},
        {"prompt": [user([IMAGE])], "chosen": [answer()], "rejected": [answer([IMAGE])], "images": ["a"]},
        {"messages": [answer()], "images": ["a"]},
    ],
)
def test_parts_and_images_must_agree(row: Mapping[str, Any]) -> None:
    with pytest.raises(DataError, match="`images` do not agree with the messages"):
        placed(row)


def test_images_of_plain_strings_are_left_to_the_tokenizer() -> None:
    row = {"prompt": "USER: <image> see?", "completion": "yes", "images": ["a"]}
    assert placed(row) == row


def test_answers_with_images_of_their_own(gallery: Gallery) -> None:
    """A sequence has one list of images, so both answers of a pair must have the same."""
    one, two = ([{"type": "image", "image": encoded(seed=seed)}] for seed in (0, 1))
    row = {"prompt": [user("draw")], "chosen": [answer(one)], "rejected": [answer(two)]}
    with pytest.raises(DataError, match="others in one answer"):
        placed(taken(row, gallery))
    row["rejected"] = [answer([*one, text("no")])]
    assert placed(taken(row, gallery))["images"] == [gallery.take(encoded())]


def test_both_columns(gallery: Gallery) -> None:
    with pytest.raises(DataError, match="`image` and `images` are both there"):
        taken({"image": PNG, "images": [PNG]}, gallery)
    with pytest.raises(DataError, match="`images` is no list"):
        taken({"images": PNG}, gallery)


def load(root: Path, rows: Sequence[Any], **options: Any) -> FakeContext:
    (root / "data").mkdir(exist_ok=True)
    path = root / "data" / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    stage = catalogue().stage("data.load")
    return FakeContext(root, stage, configured(stage, path="data/rows.jsonl", **options), {})


def test_loading(tmp_path: Path) -> None:
    """Each image once, beside rows that name it; an equal one of another file is the same."""
    folder = tmp_path / "data" / "pictures"
    folder.mkdir(parents=True)
    (folder / "one.png").write_bytes(PNG)
    (folder / "same.png").write_bytes(PNG)
    (folder / "two.jpg").write_bytes(encoded("JPEG"))
    rows = [
        {"messages": [user("What?"), answer()], "image": "pictures/one.png"},
        {"messages": [user("And?"), answer()], "image": "pictures/same.png"},
        {"messages": [user("These?"), answer()], "images": ["pictures/two.jpg", f"data:;base64,{TEXT}"]},
        {"messages": [user("Nothing?"), answer()]},
    ]
    context = load(tmp_path, rows, images="data/pictures")
    run(context)
    data = context.result("data")
    first, second, third, last = read_rows(data)
    assert first["images"] == second["images"] and len(third["images"]) == 2
    assert third["images"][1] == first["images"][0]
    assert first["messages"][0]["content"] == [IMAGE, text("What?")]
    assert last == {"messages": [user("Nothing?"), answer()]}
    assert len(list((data.path / "images").iterdir())) == 2
    for name in (*first["images"], *third["images"]):
        assert Image.of(name, data.path).size == (6, 8)


def test_splits_get_their_own_images(tmp_path: Path) -> None:
    rows = [
        {"prompt": f"{i}?", "completion": "yes", "images": [base64.b64encode(encoded(seed=i)).decode()]}
        for i in range(12)
    ]
    context = load(tmp_path, rows, split={"test": 0.4})
    run(context)
    for port in ("train", "test"):
        data = context.result(port)
        named = {name for row in read_rows(data) for name in row["images"]}
        assert named == {f"images/{path.name}" for path in (data.path / "images").iterdir()}


def test_a_broken_image_is_named_by_row_and_column(tmp_path: Path) -> None:
    rows = [
        {"prompt": "a", "completion": "b", "image": TEXT},
        {"prompt": "c", "completion": "d", "image": "gone.png"},
        {"prompt": "e", "completion": "f", "images": [TEXT, TEXT[:40]]},
    ]
    with pytest.raises(DataError) as raised:
        run(load(tmp_path, rows))
    told = str(raised.value)
    assert "line 2" in told and "`image` is neither a file that is there" in told
    assert "line 3" in told and "`images` cannot be decoded" in told
    assert "line 1" not in told


def test_a_file_that_is_not_in_the_key(tmp_path: Path) -> None:
    """Without the option `images` the content of files would not be part of the stage's key."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "one.png").write_bytes(PNG)
    with pytest.raises(DataError, match=r"set `images` of `data\.load`"):
        run(load(tmp_path, [{"prompt": "a", "completion": "b", "image": "one.png"}]))


def test_rows_that_differ_by_their_images_alone(tmp_path: Path) -> None:
    """They are neither repeated, nor the same prompt, nor the other order of an earlier pair."""
    pairs = [("yes", "no"), ("no", "yes")]
    rows = [
        {
            "prompt": "see?",
            "chosen": chosen,
            "rejected": rejected,
            "image": base64.b64encode(encoded(seed=i)).decode(),
        }
        for i, (chosen, rejected) in enumerate(pairs)
    ]
    context = load(tmp_path, rows)
    run(context)
    data = context.result("data")
    assert not data.facts.flaws
    assert len(set((data.path / "prompts.txt").read_text().split())) == 2


def test_images_as_the_datasets_library_stores_them(tmp_path: Path) -> None:
    """A saved dataset and a Parquet file hold bytes; they are kept as they are."""
    import datasets

    contents = [encoded("JPEG", seed=i) for i in range(3)]
    given = datasets.Dataset.from_dict(
        {
            "prompt": ["<image>a", "<image><image>b"],
            "completion": ["c", "d"],
            "images": [
                [{"bytes": contents[0], "path": None}],
                [{"bytes": each, "path": None} for each in contents[1:]],
            ],
        },
        features=datasets.Features(
            prompt=datasets.Value("string"),
            completion=datasets.Value("string"),
            images=datasets.List(datasets.Image()),
        ),
    )
    given.save_to_disk(str(tmp_path / "saved"))
    given.to_parquet(str(tmp_path / "rows.parquet"))
    stage = catalogue().stage("data.load")
    for path in ("saved", "rows.parquet"):
        root = tmp_path / f"from-{path}"
        context = FakeContext(root, stage, configured(stage, path=f"../{path}"), {})
        run(context)
        data = context.result("data")
        names = [name for row in read_rows(data) for name in row["images"]]
        assert [(data.path / name).read_bytes() for name in names] == contents
