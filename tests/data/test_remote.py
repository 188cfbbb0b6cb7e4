"""Shards by braces, from a web server and from commands: named, allowed, fetched once, kept within bounds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from disco_ds.config.data import RemoteSettings
from disco_ds.data import Manifest, list_shards, load_sources
from helpers.remote import ALL
from helpers.shards import SIZES, settings


@pytest.mark.parametrize(
    ("text", "names", "first"),
    [
        ("/data/{00..02}.tar", ["00.tar", "01.tar", "02.tar"], None),
        (
            "/my data/x{b,a}/{8..10}.tar",
            ["xa/10.tar", "xa/8.tar", "xa/9.tar", "xb/10.tar", "xb/8.tar", "xb/9.tar"],
            None,
        ),
        ("/data/one.tar", ["one.tar"], None),
        (
            "https://u:secret@h/x/{0..1}.tar?sig=a/b&c={d}",
            ["0.tar", "1.tar"],
            "https://u:secret@h/x/0.tar?sig=a/b&c={d}",
        ),
        ("http://h/x/one.tar?sig=a/b.tar", ["one.tar"], "http://h/x/one.tar?sig=a/b.tar"),
        ("http://h/get?part={0..1}&key=k", ["0", "1"], "http://h/get?part=0&key=k"),
        (
            "pipe:curl -s 's3://b/{x,y}/{0..1}.tar' | cat",
            ["x/0.tar", "x/1.tar", "y/0.tar", "y/1.tar"],
            "pipe:curl -s 's3://b/x/0.tar' | cat",
        ),
        ("pipe:cat /x/one.tar", ["one.tar"], "pipe:cat /x/one.tar"),
    ],
)
def test_shards_by_braces_have_names_without_secrets(text: str, names: list[str], first: str | None) -> None:
    listing = list_shards(text)
    assert list(listing.names) == names
    assert listing.urls[:1] == ((first,) if first else ())
    assert len(listing.urls) in (0, len(names))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("/data/{0..", "do not match"),
        ("/data/{a,a}.tar", "names a shard twice"),
        ("http://h/shards", "names its shards by braces"),
        ("pipe:aws s3 ls", "names its shards by braces"),
    ],
)
def test_shards_by_braces_that_make_no_sense_are_refused(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        list_shards(text)


def test_local_braces_take_their_part_of_the_folders_manifest(shards: Manifest, tmp_path: Path) -> None:
    (part,) = load_sources(settings(shards.folder / "{00002..00004}.tar"))
    assert isinstance(part, Manifest)
    assert part.shards == shards.shards[2:5]
    (one,) = load_sources(settings(shards.folder / "00007.tar"))
    assert one.sizes == SIZES[7:]
    (whole,) = load_sources(settings(shards.folder / ALL))
    assert whole.fingerprint == shards.fingerprint
    with pytest.raises(ValueError, match=r"data.shards: .*manifest.json does not list 00008.tar, 00009.tar; count"):
        load_sources(settings(shards.folder / "{00007..00009}.tar"))
    with pytest.raises(
        ValueError, match=r"there is no .*manifest.json; count the shards: disco-ds index 'SHARDS' --to"
    ):
        load_sources(settings(tmp_path / "{a,b}.tar"))
    (shards.folder / "00003.tar").unlink()
    with pytest.raises(ValueError, match=r"has no 00003.tar"):
        load_sources(settings(shards.folder / ALL))


def test_remote_shards_are_off_unless_allowed(tmp_path: Path) -> None:
    both = settings(shards=None, sources=[{"shards": "http://h/{0..1}.tar"}, {"shards": "pipe:touch /x {0..1}.tar"}])
    with pytest.raises(ValueError, match=r"data.sources\[0\]: .* data.remote.http=true"):
        load_sources(both)
    only = both.model_copy(update={"remote": RemoteSettings(http=True)})
    manifest = tmp_path / "m.json"
    manifest.write_text(
        json.dumps({"version": 1, "shards": [{"name": f"{i}.tar", "samples": 1, "bytes": 1} for i in (0, 1)]})
    )
    parts = [part.model_copy(update={"manifest": manifest}) for part in both.sources or ()]
    with pytest.raises(
        ValueError, match=r"data.sources\[1\]: a pipe: runs its command in a shell.*data.remote.pipe=true"
    ):
        load_sources(only.model_copy(update={"sources": tuple(parts)}))
    with pytest.raises(ValueError, match=r"data.shards: remote shards need a manifest; count them: disco-ds index"):
        load_sources(settings("http://h/{0..1}.tar", remote={"http": True}))
    with pytest.raises(ValueError, match=r"s3:// is not read directly: .* or a pipe:"):
        load_sources(settings("s3://b/{0..1}.tar", remote={"http": True, "pipe": True}))
