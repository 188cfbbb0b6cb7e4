"""The example that gives a share of the samples the captions of others."""

import json

from examples.shuffled_captions import read_captions, stages


def shuffle(num: int) -> list[dict[str, str]]:
    fields = {"caption": "mine", "keywords": "mine too", "vendor": "noto"}
    samples = [
        {"__key__": f"{i:09d}", "json": json.dumps(fields).encode(), "png": b"x"}
        for i in range(num)
    ]
    (stage,) = stages()
    return [json.loads(sample["json"]) for sample in stage(iter(samples))]


def test_share_of_the_captions_is_that_of_others() -> None:
    captions = read_captions()
    assert len(captions) == 6080
    found = shuffle(2000)
    assert all(each["vendor"] == "noto" for each in found)
    shuffled = [each for each in found if each["caption"] != "mine"]
    assert 540 < len(shuffled) < 660
    assert {(each["caption"], each["keywords"]) for each in shuffled} <= set(captions)
    assert shuffle(50) == found[:50]
