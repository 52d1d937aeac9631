"""Metrics against values computed by hand."""

import math

import numpy as np
import pytest

from whale.datasets.answers import exact_match, majority, same_form
from whale.datasets.caption_metrics import bleu, cider_d, tokenize
from whale.datasets.retrieval import recalls, same_label
from whale.datasets.vqa import normalise_answer, vqa_accuracy
from whale.errors import WhaleError


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("A dog's bed, on the Mat.", ["a", "dog's", "bed", "on", "the", "mat"]),
        ("狗脸 and 2 cats!", ["狗", "脸", "and", "2", "cats"]),
        ("two狗two", ["two", "狗", "two"]),
        (" ...", []),
    ],
)
def test_words(text, words):
    assert tokenize(text) == words


def test_bleu_by_hand():
    # 5 of 5 words, 3 of 4 pairs, 2 of 3 triples, 1 of 2 fours; one word too short.
    made, given = {1: "the cat sat on mat"}, {1: ["The cat sat on the mat."]}
    brevity = math.exp(1 - 6 / 5)
    expected = [1, (3 / 4) ** (1 / 2), (3 / 4 * 2 / 3) ** (1 / 3), (1 / 4) ** (1 / 4)]
    assert bleu(made, given) == pytest.approx([brevity * e for e in expected])


def test_bleu_counts_a_word_no_oftener_than_one_reference_has_it():
    made, given = {1: "the the the"}, {1: ["the cat the", "the dog"]}
    assert bleu(made, given)[:2] == pytest.approx([2 / 3, 0])


def test_bleu_adds_counts_of_all_captions_and_takes_the_nearest_length():
    made = {1: "a b c d", 2: "x y"}
    given = {1: ["a b c d e f g", "a b c d e"], 2: ["x z"]}
    # Words 5 of 6, pairs 3 of 4; lengths 6 made, 5 + 2 given.
    brevity = math.exp(1 - 7 / 6)
    assert bleu(made, given)[:2] == pytest.approx([brevity * 5 / 6, brevity * math.sqrt(5 / 8)])
    assert bleu({1: "a b c d"}, {1: ["a b c d"]}) == (1, 1, 1, 1)
    assert bleu({1: ""}, {1: ["a"]}) == (0, 0, 0, 0)


def test_cider_of_the_given_captions_is_ten():
    texts = {1: "a b c d", 2: "e f g h", 3: "i j k l m"}
    given = {image: [text] for image, text in texts.items()}
    assert cider_d(texts, given) == pytest.approx(10)
    # Two words have no triples or fours: half of the four lengths of n-grams score nothing.
    assert cider_d({1: "a b", 2: "c d"}, {1: ["a b"], 2: ["c d"]}) == pytest.approx(5)


def test_cider_by_hand():
    given = {1: ["a b c d"], 2: ["e f g h"]}
    # Of image 1: 2 of 4 words, 1 of 3 pairs agree, all equally rare; image 2 is perfect.
    one = 10 * (1 / 2 + 1 / 3) / 4
    assert cider_d({1: "a b x y", 2: "e f g h"}, given) == pytest.approx((one + 10) / 2)
    # Two words too few: cosines 2/(sqrt2 sqrt4) and 1/(sqrt1 sqrt3), times the penalty.
    short = 10 * (1 / math.sqrt(2) + 1 / math.sqrt(3)) / 4 * math.exp(-(2**2) / (2 * 6**2))
    assert cider_d({1: "a b", 2: "e f g h"}, given) == pytest.approx((short + 10) / 2)
    # Repeating a word: min(4 w, w) w / (4 w * 2 w).
    assert cider_d({1: "a a a a", 2: "e f g h"}, given) == pytest.approx((10 / 8 / 4 + 10) / 2)


def test_cider_gives_nothing_for_what_every_image_has():
    given = {1: ["a cat", "a dog"], 2: ["a hat", "a bat"]}
    assert cider_d({1: "a", 2: "a"}, given) == 0
    # Image 1: against "a cat" words: (0, ln2) is the same, pair the same; against "a dog" nothing.
    assert cider_d({1: "a cat", 2: "a"}, given) == pytest.approx(10 * (1 + 1) / 4 / 2 / 2)


def test_captions_need_given_ones():
    with pytest.raises(WhaleError, match="1 of 2 images have no given caption, image 2"):
        bleu({1: "a", 2: "b"}, {1: ["a"]})
    with pytest.raises(WhaleError, match="no captions were made"):
        cider_d({}, {})


@pytest.mark.parametrize(
    ("text", "form"),
    [
        ("The Two dogs.", "2 dogs"),
        ("3.5", "3.5"),
        ("1,000", "1000"),
        ("red, white; blue", "red white blue"),
        ("dont", "don't"),
        ("don’t", "don't"),
        ("It is 12:30!", "it is 12:30"),
        ("T-shirt\n", "t-shirt"),
        ("none", "0"),
        ("a", ""),
        ("U.S.", "us"),
    ],
)
def test_answers_in_one_form(text, form):
    assert normalise_answer(text) == form


@pytest.mark.parametrize(
    ("agree", "accuracy"), [(0, 0), (1, 0.3), (2, 0.6), (3, 0.9), (4, 1), (10, 1)]
)
def test_vqa_accuracy_of_ten_people(agree, accuracy):
    answers = ["Two"] * agree + [f"other {i}" for i in range(10 - agree)]
    assert vqa_accuracy("2", answers) == pytest.approx(accuracy)
    by_definition = [
        min(sum(a == "Two" for a in answers[:i] + answers[i + 1 :]) / 3, 1) for i in range(10)
    ]
    assert vqa_accuracy("two.", answers) == pytest.approx(sum(by_definition) / 10)


def test_vqa_accuracy_needs_several_people():
    with pytest.raises(WhaleError, match="1 answers to compare with"):
        vqa_accuracy("2", ["2"])


def test_recall_by_hand():
    scores = np.array([[0.9, 0.1, 0.3], [0.8, 0.5, 0.1], [0.2, 0.7, 0.6]])
    found = recalls(scores, ks=(1, 2, 3))
    assert found.forward == pytest.approx({1: 1 / 3, 2: 1.0, 3: 1.0})
    # Columns: 0.9 is first; 0.5 is behind 0.7; 0.6 is first.
    assert found.backward == pytest.approx({1: 2 / 3, 2: 1.0, 3: 1.0})


def test_recall_with_several_right_answers_and_other_counts():
    right = same_label(["cat", "dog"], ["dog", "cat", "cat", "dog"])
    assert right.tolist() == [[False, True, True, False], [True, False, False, True]]
    scores = np.array([[0.5, 0.1, 0.9, 0.2], [0.1, 0.3, 0.2, 0.25]])
    found = recalls(scores, right, ks=(1, 2))
    assert found.forward == pytest.approx({1: 0.5, 2: 1.0})
    assert found.backward == pytest.approx({1: 0.5, 2: 1.0})


def test_equal_scores_find_nothing():
    found = recalls(np.zeros((5, 5)), ks=(1, 4, 5))
    assert found.forward == found.backward == {1: 0.0, 4: 0.0, 5: 1.0}


@pytest.mark.parametrize(
    ("scores", "right", "ks", "message"),
    [
        (np.zeros(3), None, (1,), r"shape \(3,\)"),
        (np.zeros((2, 2)), np.ones((2, 3)), (1,), r"\(2, 2\), `right` \(2, 3\)"),
        (np.full((2, 2), np.nan), None, (1,), "4 of 4 scores are not numbers"),
        (np.zeros((2, 2)), np.array([[1, 1], [0, 0]]), (1,), "query 1 has no right"),
        (np.zeros((2, 3)), None, (1,), "query 2 has no right"),
        (np.zeros((2, 2)), None, (0,), "at least 1"),
    ],
)
def test_recall_refuses_what_has_no_meaning(scores, right, ks, message):
    with pytest.raises(WhaleError, match=message):
        recalls(scores, right, ks)


def test_exact_match_and_the_most_frequent_answer():
    assert same_form("  Food  and Drink. ") == "food and drink"
    assert exact_match(["Yes.", "no", "no"], ["yes", "no", "yes"]) == pytest.approx(2 / 3)
    best = majority(["no", "Yes", "yes", "no", "yes"], ["yes", "no", "no", "no"])
    assert (best.answer, best.accuracy) == ("Yes", 0.25)
    assert majority(["b", "a"]).answer == "a"
    with pytest.raises(WhaleError, match="1 replies to 2 questions"):
        exact_match(["a"], ["a", "b"])
    with pytest.raises(WhaleError, match="no answers"):
        majority([])
