"""Files in the forms of COCO captions and VQA v2, written small."""

import json

import pytest

from whale.datasets.caption_metrics import bleu, cider_d
from whale.datasets.coco import CocoPictures, read_coco, read_coco_results
from whale.datasets.vqa import VqaPictures, read_vqa, vqa_score
from whale.errors import WhaleError

CAPTIONS = {
    "info": {},
    "images": [
        {"id": 9, "file_name": "nine.png", "height": 4, "width": 4},
        {"id": 4, "file_name": "four.png", "height": 4, "width": 4},
    ],
    "annotations": [
        {"id": 1, "image_id": 4, "caption": "a red square on white "},
        {"id": 2, "image_id": 9, "caption": "one blue thing over there"},
        {"id": 3, "image_id": 4, "caption": "Red."},
    ],
}
QUESTIONS = {
    "questions": [
        {"question_id": 41, "image_id": 4, "question": "What colour?"},
        {"question_id": 91, "image_id": 9, "question": "Is it red?"},
    ]
}
ANNOTATIONS = {
    "annotations": [
        {
            "question_id": 91,
            "answer_type": "yes/no",
            "question_type": "is it",
            "answers": [{"answer": "no", "answer_id": i} for i in range(10)],
        },
        {
            "question_id": 41,
            "answer_type": "other",
            "question_type": "what",
            "answers": [{"answer": "Red"}] * 2 + [{"answer": "pink"}] * 8,
        },
    ]
}


def write(folder, name, content):
    path = folder / name
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


@pytest.fixture
def pictures(tmp_path):
    image = pytest.importorskip("PIL.Image")
    image.new("RGB", (6, 4), (255, 0, 0)).save(tmp_path / "four.png")
    image.new("RGB", (6, 4), (0, 0, 255)).save(tmp_path / "nine.png")
    for number, name in ((4, "four"), (9, "nine")):
        (tmp_path / f"COCO_{number:04d}.png").write_bytes((tmp_path / f"{name}.png").read_bytes())
    return tmp_path


def test_coco_captions_are_read_and_scored(tmp_path):
    read = read_coco(write(tmp_path, "captions_val.json", CAPTIONS))
    assert read.captions == {
        4: ("a red square on white", "Red."),
        9: ("one blue thing over there",),
    }
    results = [
        {"image_id": 4, "caption": "a red square on white"},
        {"image_id": 9, "caption": "one blue thing over there"},
    ]
    made = read_coco_results(write(tmp_path, "results.json", results))
    assert bleu(made, read.captions) == (1, 1, 1, 1)
    # Image 9 is perfect; image 4 is like one of its two captions, and 1/sqrt(5) in words like
    # the other, which is four words shorter.
    other = 10 / 4 / 5**0.5 * 2.718281828459045 ** (-(4**2) / 72)
    assert cider_d(made, read.captions) == pytest.approx((10 + (10 + other) / 2) / 2)


def test_coco_pictures_have_a_sample_for_each_caption(pictures):
    read = read_coco(write(pictures, "captions_val.json", CAPTIONS))
    samples = CocoPictures(read, pictures, side=2)
    assert len(samples) == 3
    assert [samples[i].key for i in range(3)] == ["4/0", "4/1", "9/0"]
    assert samples[2].captions == {"en": "one blue thing over there"}
    assert (samples[2].image == [0, 0, 255]).all()
    with pytest.raises(WhaleError, match="captions_val.json, image 4: there is no picture"):
        CocoPictures(read, pictures / "elsewhere")[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"images": None}, '"images" is a NoneType; a list is needed'),
        ({"images": [{"id": 1}]}, r'images\[0\]: no "file_name" here, only \[\'id\'\]'),
        ({"images": [{"id": "x", "file_name": "a"}]}, r"images\[0\]: \"id\" is 'x'; a whole"),
        ({"annotations": [{"image_id": 5, "caption": "x"}]}, "image 5 is not among the 2 images"),
        ({"annotations": [{"image_id": 4}]}, r'annotations\[0\]: no "caption"'),
    ],
)
def test_a_wrong_coco_file_is_refused(tmp_path, change, message):
    with pytest.raises(WhaleError, match=message):
        read_coco(write(tmp_path, "captions.json", CAPTIONS | change))


def test_files_that_are_no_annotations_are_refused(tmp_path):
    with pytest.raises(WhaleError, match="cannot read .*gone.json"):
        read_coco(tmp_path / "gone.json")
    (tmp_path / "text.json").write_text("hello")
    with pytest.raises(WhaleError, match="cannot read .*text.json"):
        read_coco(tmp_path / "text.json")
    with pytest.raises(WhaleError, match="holds a list; a dict is needed"):
        read_coco(write(tmp_path, "list.json", []))
    with pytest.raises(WhaleError, match='no "images" here'):
        read_coco(write(tmp_path, "questions.json", QUESTIONS))
    twice = [{"image_id": 4, "caption": "a"}] * 2
    with pytest.raises(WhaleError, match=r"\[1\]: image 4 has a second caption"):
        read_coco_results(write(tmp_path, "twice.json", twice))


def test_vqa_is_read_and_scored(tmp_path):
    asked = read_vqa(
        write(tmp_path, "questions.json", QUESTIONS), write(tmp_path, "answers.json", ANNOTATIONS)
    )
    assert [q.question_id for q in asked] == [41, 91]
    assert asked[0].best_answer == "pink"
    assert asked[0].answer_type == "other"
    score = vqa_score({41: "red", 91: "No."}, asked)
    assert score.by_answer_type == pytest.approx({"other": 0.6, "yes/no": 1.0})
    assert score.overall == pytest.approx(0.8)
    assert score.num_questions == 2
    with pytest.raises(WhaleError, match="1 of 2 questions have no reply, 91"):
        vqa_score({41: "red"}, asked)
    with pytest.raises(WhaleError, match="no questions"):
        vqa_score({}, [])


def test_vqa_pictures_carry_question_and_answer(pictures):
    asked = read_vqa(
        write(pictures, "questions.json", QUESTIONS), write(pictures, "answers.json", ANNOTATIONS)
    )
    samples = VqaPictures(asked, pictures, file="COCO_{:04d}.png", side=2)
    assert (samples[1].question, samples[1].answer) == ("Is it red?", "no")
    assert (samples[1].image == [0, 0, 255]).all()
    with pytest.raises(WhaleError, match="question 41: there is no picture .*4.jpg"):
        VqaPictures(asked, pictures, file="{}.jpg")[0]
    with pytest.raises(WhaleError, match="the same for every image"):
        VqaPictures(asked, pictures, file="a.jpg")


def test_vqa_without_answers_or_with_those_of_another_split(tmp_path):
    path = write(tmp_path, "questions.json", QUESTIONS)
    assert [q.best_answer for q in read_vqa(path)] == [None, None]
    other = {"annotations": ANNOTATIONS["annotations"][:1]}
    with pytest.raises(WhaleError, match=r"questions\[0\]: question 41 is not among the 1"):
        read_vqa(path, write(tmp_path, "other.json", other))
