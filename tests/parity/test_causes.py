"""Each cause, in pairs of samples to one of which its mechanism, and nothing else, was applied; and what resembles it.

Pictures that real processors were handed: test_plants.py. Videos: test_videos.py.
"""

import copy

import numpy as np
import pytest
from support.planting.episodes import (
    END,
    IMAGE,
    START,
    decode,
    episode,
    finish,
    look,
    other,
    settings,
)
from support.planting.said import check
from support.samples import make_sample

import mmpack as mp
from mmpack.families import get_family

ELSE, KEY = "0" * 64, "1" * 64  # another content, another key


def runs(sample):
    ids = sample.input_ids == IMAGE
    edges = np.flatnonzero(np.diff(ids.astype(int), prepend=0, append=0))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def handed(sample, index=0, **fields):
    """Media[index] as other pixels."""
    medium = sample.media[index]
    medium.content_hash, medium.cache_key = ELSE, KEY
    for name, value in fields.items():
        setattr(medium, name, value)
    return sample


def stranger(left, index=0, **fields):
    """Media[index] as another picture: another name, file, content and key."""
    return handed(other(left), index, **{"media_id": "another", "file_hash": "e" * 64} | fields)


def seen(medium, thumbnail, **fields):
    medium.metadata = {"picture": {"thumbnail": thumbnail, **fields}}


# ---- pictures ----------------------------------------------------------------------------------


def test_max_pixels_is_said_of_all_that_follows_from_it():
    right = episode(grid=(1, 4, 4), processor=settings(image={"max_pixels": 50176}))
    said = "processor.image.max_pixels: rollout 1003520, train 50176"
    report = check(episode(), right, "max_pixels", said)
    fields = ["input_ids", "modality_spans", "position_ids", "media", "loss_spans", "processor"]
    assert [f.field for f in report.findings] == fields
    # 12 image tokens against 4, from token 4
    assert (report.first.index, report.first.span) == (8, (4, 16))
    assert "12 placeholders" in report.first.left and "4 placeholders" in report.first.right


def test_grids_that_nothing_explains():
    left, right = episode(), episode(grid=(1, 4, 4))
    check(left, right, "unknown")
    for sample in (left, right):
        sample.processor = sample.processor_fingerprint = None
    check(left, right, "unknown", "possible: max_pixels")


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("height", (448, 224)),
        ("max_height", (896, 448)),
        ("max_patches", (12, 4)),
        ("crop_to_patches", (True, False)),
    ],
)
def test_limits_of_tiles_are_pixel_limits(name, values):
    left, right = episode(), episode(grid=(1, 4, 4))
    for sample in (left, right):
        sample.processor = settings()
        sample.processor["image"] = {"height": 448, "width": 448, name: values[0]}
    check(left, right, "unknown", "pixel limits are equal")
    right.processor["image"][name] = values[1]
    check(left, right, "max_pixels", f"processor.image.{name}: rollout")


@pytest.mark.parametrize(
    ("family", "values", "said"),
    [
        ("mistral3", {"max_pixels": (1540, 1024)}, "size.longest_edge (rollout 1540, train 1024)"),
        ("gemma4", {"max_pixels": (645120, 161280)}, "max_soft_tokens (rollout 280, train 70)"),
        ("gemma3", {"height": (896, 448)}, "size.height (rollout 896, train 448)"),
        ("glm4v", {"do_resize": (True, False)}, "do_resize (rollout True, train False)"),
    ],
)
def test_limits_bear_the_names_that_users_set(family, values, said):
    left, right = chat(family), chat(family)
    for k, side in enumerate((left, right)):
        side.processor["image"] = {name: both[k] for name, both in values.items()}
    (only,) = check(left, right, "max_pixels").findings
    assert only.fix == f"Set the same {said} on both sides."


@pytest.mark.parametrize(
    "size",
    [
        (640, 640),  # padded to a square
        (616, 448),  # cut to a multiple of the factor, or resized to it
        (448, 336),  # of one shape: resized under unknown limits, or its middle cut out
        (601, 433),
    ],
)
def test_a_picture_that_may_have_been_cut_or_padded_is_unknown(size):
    left, right = episode(), handed(episode(), size=size)
    check(left, right, "unknown", "possible: resize_twice")
    for sample in (left, right):
        seen(sample.media[0], look())
    check(left, right, "resize_twice" if size[0] < 610 else "unknown")
    seen(right.media[0], look(1))
    report = check(left, right, "unknown", "thumbnails differ")
    assert "possible" not in report.first.evidence


@pytest.mark.parametrize(
    ("was", "becomes", "cause"),
    [
        ({"format": "PNG"}, {"format": "JPEG"}, "jpeg_reencode"),
        ({"format": "PNG"}, {"format": "PNG"}, "unknown"),  # lossless: pixels would be the same
        ({"format": "PNG"}, {"format": "JPEG", "thumbnail": look(1)}, "unknown"),
    ],
)
def test_jpeg_reencode(was, becomes, cause):
    left, right = episode(), handed(episode(), file_hash="e" * 64)
    check(left, right, "unknown", "possible: jpeg_reencode")
    for sample, fields in ((left, was), (right, becomes)):
        seen(sample.media[0], **{"thumbnail": look()} | fields)
    check(left, right, cause)
    left.media[0].mode, right.media[0].mode = "RGB", "L"  # greyed
    check(left, right, "unknown")


@pytest.mark.parametrize(
    ("was", "becomes", "possible"),
    [
        ({"exif_orientation": 6}, {"size": (480, 640), "exif_orientation": None}, "exif_rotation"),
        ({"exif_orientation": 6}, {"size": (480, 640)}, "exif_rotation"),
        ({}, {"size": (644, 476), "decoded_size": None}, "resize_twice"),
        ({}, {"size": (644, 476)}, "resize_twice"),  # decoded to one size by chance
    ],
)
def test_another_picture_is_never_named_for_what_one_picture_would_show(was, becomes, possible):
    left = episode()
    for name, value in was.items():
        setattr(left.media[0], name, value)
    right = stranger(left, **becomes)
    report = check(left, right, "unknown", "may be another image")
    assert possible in report.first.evidence.partition("possible: ")[2]
    named = right.media[0]
    named.media_id, named.file_hash = left.media[0].media_id, "f" * 64
    named.decoded_size = left.media[0].decoded_size
    check(left, right, possible)
    named.media_id = "another"  # the file is the same
    check(left, right, possible)


@pytest.mark.parametrize(
    ("size", "cause"), [((644, 476), "resize_twice"), ((480, 640), "exif_rotation")]
)
def test_without_names_sizes_tell_one_decoded_size_that_was_handed_on_in_two(size, cause):
    left = episode()
    left.media[0].media_id, left.media[0].exif_orientation = "image:" + "a" * 16, 6
    right = stranger(left, media_id="image:" + "0" * 16, file_hash=None, size=size)
    check(left, right, cause)
    right.media[0].decoded_size = None
    check(left, right, "unknown")


def test_pictures_in_another_order():
    left = episode(grid=(1, 4, 4))
    for medium in left.media:
        medium.mode, medium.file_hash = "RGBA", medium.content_hash
    swapped = other(left)
    swapped.media.reverse()
    shown = "train has the content of rollout's media[1] in place of media[0]"
    check(left, swapped, "media_order", shown)
    late = stranger(left, 1)
    late.media[0] = copy.deepcopy(left.media[1])
    check(left, late, "media_order")


def test_cache_key_of_two_contents():
    left, right = episode(), episode()
    right.media[0].content_hash = ELSE
    check(left, right, "cache_key")
    within = episode(grid=(1, 4, 4))
    within.media[1].cache_key = within.media[0].cache_key
    check(within, other(within), "cache_key", "have one cache_key")


def drop(sample, keep_placeholders=False):
    """Lose media[0], with or without its tokens."""
    start, stop = runs(sample)[0]
    del sample.media[0]
    lost = 0 if keep_placeholders else stop - start + 2
    if lost:
        sample.input_ids = np.delete(sample.input_ids, np.arange(start - 1, stop + 1))
    sample.modality_spans = sample.modality_spans[1:]
    for span in sample.modality_spans:
        span.media_index -= 1
    for span in [*sample.modality_spans, *sample.loss_spans, *sample.observation_spans]:
        span.start, span.stop = span.start - lost, span.stop - lost
    sample.attention_mask = np.ones(len(sample), dtype=np.int8)
    return sample if keep_placeholders else finish(sample)


def test_a_picture_its_tokens_or_both_dropped():
    check(episode(), drop(episode()), "dropped_image", "train lacks media[0]")
    kept = mp.compare([episode()], [drop(episode(), keep_placeholders=True)])
    assert kept.first.cause == "dropped_image"
    right = drop(episode())
    check(episode(), stranger(right), "unknown")  # other media are no dropped image
    right.media.insert(0, copy.deepcopy(episode().media[0]))
    for span in right.modality_spans:
        span.media_index += 1
    assert mp.compare([episode()], [right]).first.cause == "dropped_image"


# ---- expansion ---------------------------------------------------------------------------------


def stretch(sample, count):
    """Media[0]'s run cut or grown to `count` placeholders, spans counted along."""
    start, stop = runs(sample)[0]
    ids, more = sample.input_ids, count - (stop - start)
    sample.input_ids = np.concatenate([ids[:start], np.full(count, IMAGE), ids[stop:]])
    sample.modality_spans[0].stop += more
    for span in [*sample.modality_spans[1:], *sample.loss_spans, *sample.observation_spans]:
        span.start, span.stop = span.start + more, span.stop + more
    sample.attention_mask = np.ones(len(sample), dtype=np.int8)
    sample.position_ids = None
    return sample


@pytest.mark.parametrize(
    ("count", "cause"),
    [(144, "double_expansion"), (24, "double_expansion"), (13, "unknown"), (1, "not_expanded")],
)
def test_runs_that_do_not_fit_their_grid(count, cause):
    right = stretch(episode(), count)
    said = f"a run of {count} placeholders in train" if cause != "unknown" else ""
    check(episode(), right, cause, said)
    check(right, other(right), f"{cause} unknown" if count == 13 else cause) if count == 144 else ()


# ---- around the conversation -------------------------------------------------------------------

PAD = 151643
TURNS = {"system": (START, 8, 11, 12)}


def around(sample, before=(), after=(), drop=0):
    """The sample with ids put before and after its own, of which the first `drop` are left out."""
    out = copy.deepcopy(sample)
    out.input_ids = np.concatenate([before, sample.input_ids[drop:], after]).astype(np.int64)
    for span in (*out.modality_spans, *out.loss_spans, *(out.observation_spans or [])):
        span.start, span.stop = (at + len(before) - drop for at in (span.start, span.stop))
    out.position_ids = None
    out.attention_mask = None if out.attention_mask is None else np.ones(len(out), np.int8)
    return out


@pytest.mark.parametrize(
    ("before", "after", "where"),
    [
        ((PAD,) * 3, (), "3 on the left (id 151643)"),
        ((PAD,), (), "1 on the left"),
        ((), (PAD,) * 2, "2 on the right"),
        ((PAD,) * 7, (PAD,) * 5, "7 on the left (id 151643), 5 on the right (id 151643)"),
        ((), (END,) * 6, "6 on the right (id 151645)"),  # a tokenizer whose pad is its eos
        ((0,) * 9, (), "9 on the left (id 0)"),
    ],
)
def test_padding_in_ids(before, after, where):
    left = episode(**TURNS)
    right = around(left, before, after)
    said = f"rollout pad ids: none; train pad ids: {where}"
    report = check(left, right, "padding_in_ids", said)
    assert report.first.index == (0 if before else len(left))
    check(around(left, (PAD,) * 2, (PAD,) * 3), right, "padding_in_ids")
    check(right, copy.deepcopy(right))
    more = around(left, (PAD,) * 5)
    check(around(left, (PAD,) * 2), more, "padding_in_ids", "train pad ids: 3 on the left")


def test_padding_in_ids_beside_other_causes():
    left, cut = episode(**TURNS), episode(**TURNS, second=(710, 711))
    cut.finish_reason = left.finish_reason = "length"
    check(left, around(cut, (PAD,) * 4, (PAD,) * 4), "padding_in_ids truncated")
    left.finish_reason = "stop"
    stopless = episode(**TURNS, second=(710, 711, 712))
    check(left, around(stopless, (), (PAD,) * 4), "stop_token padding_in_ids")
    scored = around(left, (), (PAD,) * 4)
    scored.loss_spans[1].stop += 4  # the loss covers them too
    check(left, scored, "padding_in_ids")
    middle = episode(**TURNS, asked=(21, 22, 23, 24, *(PAD,) * 5))
    check(left, middle, "padding_in_ids")  # prompt and response padded by themselves
    one = around(left, (), (PAD,))
    check(left, one, "unknown", "possible: padding_in_ids, stop_token")


FIRST = {  # ids before the first turn, then the turn's
    "gemma4": ((2,), (105, 2364, 107)),
    "mistral3": ((1,), (3,)),
    "glm4v": ((151331, 151333), (151336, 198)),
    "kimi_k25": ((163584,), (163587, 2482, 163601)),
    "gemma3": ((2,), (105, 2364, 107)),
}


def chat(family, system=(), asked=(21, 22), response=(700, 701)):
    """First ids, a system turn if there is one, a question, an answer."""
    first, user = FIRST[family]
    opens = {"mistral3": (4,), "glm4v": (151337, 198)}.get(family, (user[0], 9, 10))
    opens = (163588, 9, 10) if family == "kimi_k25" else opens
    parts = [("text", (*first, *system, *user, *asked)), ("text", opens), ("response", response, 0)]
    sample = make_sample(parts, family=family, finish_reason="stop")
    sample.processor = {"family": family, "chat_template": "sha256:" + "1" * 64}
    return sample


@pytest.mark.parametrize("family", list(FIRST)[:4])
def test_ids_before_the_first_turn(family):
    left, (first, user) = chat(family), FIRST[family]
    right = around(left, drop=len(first))
    shown = check(left, right, "bos").first
    assert (shown.index, shown.span) == (0, (0, len(first))) and shown.right == "no ids"
    check(left, around(left, first), "bos")  # twice
    pads = around(left, (get_family(family).pad_token_id,) * 3)
    check(right, pads, "padding_in_ids bos")
    check(right, chat(family, response=(700, 705)), "bos unknown")
    # a cut that takes them along, within the question or with a whole turn, is a cut
    check(left, around(left, drop=len(first) + len(user) + 1), "truncated")
    again = chat(family, system=(*user, 31, 32))
    right = around(again, drop=len(first) + len(user) + 2)
    right.processor["chat_template"] = "sha256:" + "2" * 64
    check(again, right, "unknown", "possible: chat_template, truncated")
    # a turn that is missing there is none, by one template or by two
    system = {"mistral3": (17, 31, 32, 18), "glm4v": (151335, 198, 31, 32)}.get(family)
    system = system or ({"kimi_k25": 163594}.get(family, 105), 8, 107, 31, 32, 106)
    left, right = chat(family, system=system), chat(family)
    check(left, right, "chat_template")
    left, right = (around(s, drop=len(first)) for s in (left, right))
    check(left, right, "chat_template")
    left.processor["chat_template"] = "sha256:" + "2" * 64
    check(left, right, "chat_template")


# ---- text --------------------------------------------------------------------------------------


def test_text_outside_the_loss():
    template = settings(chat_template="sha256:" + "2" * 64)
    report = check(episode(), episode(system=(11, 99, 98, 13), processor=template), "chat_template")
    assert (report.first.field, report.first.index, report.first.span) == ("input_ids", 1, (1, 2))
    check(episode(), episode(tool=(31, 99, 33)), "unknown", "possible: chat_template")
    right = episode(system=(13,))
    check(episode(), right, "unknown")  # no turn is known
    right.processor["chat_template"] = None
    check(episode(), right, "unknown", "no template hash")
    left = episode(system=(START, 8, 11, END, START, 7, 13), asked=(21, END, START, 9))
    left.position_ids = left.attention_mask = None
    right = copy.deepcopy(left)
    right.input_ids = np.append(right.input_ids, 198)  # a line break that no engine writes
    assert check(left, right, "unknown").first.field == "input_ids"


def test_system_prompt_under_one_template():
    """The first turn, if its role comes once, or its lack; no words of the user's."""
    system, user, assistant = 8, 7, 9  # roles

    def asked(*head):
        return episode(system=(START, *head), asked=(21, END, START, assistant))

    left = asked(system, 11, 12, END, START, user, 13)
    for head in ((system, 99, END, START, user, 13), (user, 13), (system, END, START, user, 13)):
        check(left, asked(*head), "chat_template")
    edited = asked(system, 11, 12, END, START, user, 99)
    check(left, edited, "unknown", "possible: chat_template")
    for rest in (
        (),
        (END, START, assistant, 22, END, START, user, 13),
        (END, START, user, 13),  # the user's turns follow each other
    ):
        check(asked(user, 11, *rest), asked(user, 12, *rest), "unknown")


def without_hash(*samples):
    for sample in samples:
        sample.metadata = {}
    return samples


def test_retokenized_response():
    report = check(episode(), episode(response=(701, 704, END)), "retokenized_response")
    assert report.first.span == (21, 23)
    check(episode(), episode(response=(701, 702, 703, END)), "retokenized_response")
    left, right = without_hash(episode(), episode(response=(701, 702, 703, END)))
    check(left, right, "unknown", "possible: retokenized_response")
    check(left, right, "retokenized_response", decode=decode)
    another = episode(response=(701, 703, END))
    report = check(episode(), another, "unknown", decode=decode)
    assert "possible" not in report.first.evidence
    for text in ("", "x\ufffd"):  # says nothing of ids
        check(left, right, "unknown", "can't say how", decode=lambda ids, text=text: text)
    left, right = episode(response=(900, 700, 901, END)), episode(response=(902, 700, 903, END))
    check(left, right, "unknown", decode=lambda ids: decode([i for i in ids if i < 900]))


@pytest.mark.parametrize(
    ("reasons", "hedged"),
    [(("stop", "stop"), True), ((None, None), True), (("length", "stop"), False)],
)
def test_a_cut_response_that_ended_by_stop_may_also_have_met_a_stop_string(reasons, hedged):
    """`finish_reason` length leaves no rival; stop, or none recorded, does, and the evidence says so."""
    for second in ((710, 711), (710,)):
        left, right = episode(), episode(second=second)
        left.finish_reason, right.finish_reason = reasons
        first = mp.compare([left], [right]).first
        hedge = "cut at a limit, or by a stop string; possible: truncated, stop_token"
        assert first.cause == "truncated" and first.evidence.endswith(hedge) == hedged


def test_ids_that_one_side_lacks_are_no_retokenized_response():
    """The text's hash was carried along with what was cut."""
    left = episode()
    for change, cause in (
        ({"second": (710, 711)}, "truncated"),
        ({"response": (700, END)}, "unknown"),
        ({"second": (710, 711, 712)}, "stop_token"),
        ({"response": (700, 703)}, "stop_token"),
    ):
        check(left, other(episode(**change), metadata=copy.deepcopy(left.metadata)), cause)
    right = episode(second=(710, 711))
    check(left, right, "truncated", decode=lambda ids: "one text")


def test_a_hash_carried_over_to_other_ids_is_no_evidence():
    right = episode(response=(703, 703, END))
    check(episode(), right, "unknown", "possible: retokenized_response, rewritten_response")
    right.metadata = copy.deepcopy(episode().metadata)
    check(episode(), right, "unknown", "possible: retokenized_response")
    again = episode(response=(701, 704, END))
    again.metadata = {k: v.partition("/")[0] for k, v in again.metadata.items()}
    check(episode(), again, "unknown")  # of which ids it is, is not known
    check(episode(), again, "retokenized_response", decode=decode)


def test_stop_tokens_and_last_words():
    left, right = episode(), episode(second=(710, 711, 712))
    left.finish_reason = right.finish_reason = "length"
    check(left, right, "unknown", "possible: stop_token, truncated")
    left.finish_reason = "stop"
    check(left, right, "truncated")
    left, right = episode(second=(710, 711, 712)), episode(second=(710, 711))
    check(left, right, "unknown", "not a special token")
    for sample in (left, right):
        del sample.processor["tokenizer"]["special_ids"]
    check(left, right, "stop_token")


def test_sampled_placeholders():
    left = episode(response=(700, IMAGE, 703, END))
    check(left, other(left), "sampled_placeholder")
    stripped = episode(response=(700, 703, END))
    check(left, stripped, "sampled_placeholder", "token 22 of rollout")
    right = other(left)  # cut out of the loss
    first = right.loss_spans[0]
    head, tail = copy.deepcopy(first), copy.deepcopy(first)
    head.stop, tail.start = first.start + 1, first.start + 2
    right.loss_spans = [head, tail, right.loss_spans[1]]
    expanded = episode(response=(700, *[IMAGE] * 12, 703, END))  # by re-processing
    for pair in ((left, right), (right, other(right)), (left, expanded)):
        assert mp.compare(*([s] for s in pair)).first.cause == "sampled_placeholder"


# ---- order of turns ------------------------------------------------------------------------------


def test_turns_exchanged():
    first, second = [START, 8, 21, 22, END, 198], [START, 9, 31, 32, END, 198]
    last = [START, 8, 41]

    def talk(*turns, response=(700, 703, END)):
        text = [i for turn in turns for i in turn]
        parts = [("text", text), ("image", (1, 4, 4), "a"), ("response", response, 0)]
        sample = make_sample(parts, finish_reason="stop")
        sample.processor = settings()
        return finish(sample)

    left = talk(first, second, last)
    check(left, talk(second, first, last), "turn_order")
    check(left, talk(second, first, last, response=(700, 703)), "turn_order stop_token")
    for fewer in (talk(first, last), talk(first, [*second[:2], 99, *second[3:]], last)):
        assert "turn_order" not in mp.compare([left], [fewer]).causes
    odd = [START, 9, 33, END, 198]  # one turn differs; that another is like it moves nothing
    check(talk(odd, first, second, last), talk(second, first, second, last), "unknown")


# ---- positions ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("padding", "cause"),
    [([7, 0], "padding_positions"), (None, "unknown"), ([0, 7], "unknown"), ([9, 0], "unknown")],
)
def test_an_offset_is_padding_only_where_it_was_recorded(padding, cause):
    """Else positions go on from another row, or count from another number."""
    left = episode()
    right = other(left, position_ids=left.position_ids + 7)
    right.metadata |= {} if padding is None else {"padding": padding}
    report = check(left, right, cause, "" if cause != "unknown" else "possible: padding_positions")
    assert (report.first.index, report.first.span) == (0, (0, len(left)))


def padded(sample, positions, pad):
    """The sample as a left-padded record is read."""
    record = sample.to_dict(numpy=True) | {
        "input_ids": [0] * pad + sample.input_ids.tolist(),
        "attention_mask": [0] * pad + [1] * len(sample),
        "position_ids": positions.tolist(),
    }
    return mp.Sample.from_dict(record, "record")


def test_padding_positions_of_a_rectangle():
    left = episode()
    whole = np.concatenate([np.ones((3, 5), dtype=int), left.position_ids + 5], axis=1)
    check(left, padded(left, whole, 5), "padding_positions", "train [5, 0]")
    counted = np.broadcast_to(np.arange(len(left) + 5), (3, len(left) + 5))
    check(left, padded(left, counted, 5), "padding_positions")
    check(left, other(left, position_ids=counted[:, 5:] - 5), "unknown")  # by no rule


@pytest.mark.adapter
def test_padding_positions_of_get_rope_index_without_a_mask():
    import torch
    from transformers import Qwen2_5_VLConfig
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel

    model = Qwen2_5_VLModel.__new__(Qwen2_5_VLModel)
    torch.nn.Module.__init__(model)
    model.config = Qwen2_5_VLConfig()
    left, pad = episode(), 9
    ids = torch.tensor([[0] * pad + left.input_ids.tolist()])
    grids = torch.tensor([m.grid_thw for m in left.media])
    kinds = (ids == IMAGE).int()
    positions, _ = model.get_rope_index(ids, mm_token_type_ids=kinds, image_grid_thw=grids)
    check(left, padded(left, positions[:, 0].numpy(), pad), "padding_positions")


# ---- loss, rewards, settings -------------------------------------------------------------------


def spans(sample, *bounds):
    out = other(sample)
    for span, (start, stop) in zip(out.loss_spans, bounds, strict=False):
        span.start, span.stop = start, stop
    out.loss_spans = out.loss_spans[: len(bounds)]
    return out


def test_loss_mask_shift():
    left = episode()
    (a, b), (c, d) = [(s.start, s.stop) for s in left.loss_spans]
    for moved in (
        [(a - 1, b - 1), (c, d)],
        [(a + 1, b + 1), (c, d)],
        [(a, b - 1), (c, d - 1)],  # misses the end of each turn
        [(a, b + 1), (c, d)],
        [(a, b + 3), (c, d)],  # covers the tool's words
        [(a, d)],  # covers the tool's words and its picture
    ):
        assert mp.compare([left], [spans(left, *moved)]).first.cause == "loss_mask_shift"
        assert "loss_mask_shift" in mp.compare([spans(left, *moved)], [left]).causes
    wrong = spans(left, (a, b + 3), (c, d))
    check(left, wrong, "loss_mask_shift")
    check(wrong, other(wrong), "loss_mask_shift", "MM204 in both sides")


def test_turns_and_holes_that_one_loss_leaves_out():
    left = episode()
    for k, kept in enumerate((left.loss_spans[1:], left.loss_spans[:1])):
        said = f"response {k + 1} of rollout has no loss in train"
        check(left, other(left, loss_spans=kept), "turn_without_loss", said)
    left = episode(response=(700, 703, 704, 705, END))
    first, second = left.loss_spans
    ends = ((first.start, first.start + 2), (first.start + 3, first.stop))
    right = other(left, loss_spans=[*(mp.LossSpan(a, b, turn=0) for a, b in ends), second])
    check(left, right, "unknown", "train's loss leaves out 1 token within a response; possible: ")
    right.loss_spans[0].stop += 1  # cut in two, and equal
    check(left, right)


def test_empty_response():
    left = episode()
    left.loss_spans[1].stop = left.loss_spans[1].start
    left.rewards = [mp.Score("exact", 1.0, {"turn": 1})]
    check(left, other(left), "empty_response")


@pytest.mark.parametrize(
    ("changed", "cause", "path"),
    [
        ({"image": {"max_pixels": 1}}, "max_pixels", "processor.image.max_pixels"),
        ({"position_rule": "max"}, "position_rule", "processor.position_rule"),
        ({"tokens_per_second": 4.0}, "second_per_grid_ts", "processor.tokens_per_second"),
        ({"image": {"merge_size": 3}}, "model_family", "processor.image.merge_size"),
        ({"tokenizer": {"vocab_sha256": "0"}}, "unknown", "processor.tokenizer.vocab_sha256"),
    ],
)
def test_settings(changed, cause, path):
    check(episode(), other(episode(), processor=settings(**changed)), cause, path)


def test_settings_that_one_side_did_not_record():
    right = episode()
    del right.processor["image"]["max_pixels"]
    right.processor["video"] = None
    report = check(episode(), right)
    assert {"processor.image.max_pixels", "processor.video.merge_size"} <= set(report.not_compared)
    assert not mp.compare([episode()], [right], require=("processor",)).ok
    left, right = episode(), episode()
    left.processor = right.processor = None
    check(left, right, require=("processor",))  # by the fingerprint
    right.processor_fingerprint = "sha256:" + ELSE
    check(left, right, "unknown")


# ---- several -----------------------------------------------------------------------------------


def test_two_causes_in_one_sample():
    """Pairs of all causes: test_two_causes.py."""
    smaller = settings(image={"max_pixels": 50176}, chat_template="sha256:" + "2" * 64)
    right = episode(system=(99,), grid=(1, 4, 4), processor=smaller)
    check(episode(), right, "chat_template max_pixels")
    smaller = settings(image={"max_pixels": 50176})
    right = episode(grid=(1, 4, 4), tool=(31, 99, 33), processor=smaller)
    check(episode(), right, "max_pixels unknown")
    turn = (21, END, START, 9)
    left = episode(system=(START, 8, 11, START, 7), asked=turn)
    system = (START, 8, 99, START, 7)
    moved = episode(system=system, asked=turn)
    moved.loss_spans[0].start += 1
    check(left, moved, "chat_template loss_mask_shift")
    encoded = episode(system=system, response=(701, 704, END), asked=turn)
    check(left, encoded, "chat_template retokenized_response")


def test_every_broken_rule_is_a_finding():
    left = episode()
    left.media[0].num_tokens = 5
    check(left, other(left), "unknown", "MM108 in both sides")
    right = other(left, media=episode().media)
    (one,) = [f for f in mp.compare([left], [right]).findings if "MM108" in f.evidence]
    assert one.fix == "Set it to t·(h/m)·(w/m), where m is the merge size."
    assert one.left.startswith("says num_tokens 5") and one.right == "keeps this rule"
