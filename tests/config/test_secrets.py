"""Secrets in settings are refused, and masked in messages."""

from pathlib import Path

import pytest

from disco_ds.cli.main import main
from disco_ds.config import load_config
from disco_ds.config.secrets import expand, redact, refuse_secret

WRITTEN_OUT = [
    "https://me:hunter2@host/{0..9}.tar",
    "https://me:hunter2:hunter2@host/{0..9}.tar",
    "https://hunter2@host/{0..9}.tar",
    "https://h/{0..9}.tar?X-Amz-Credential=$ID&X-Amz-Signature=hunter2&x=1",
    "https://account.blob/{0..9}.tar?sv=2020&sig=hunter2",
    "pipe:curl -H 'Authorization: Bearer hunter2' https://h/{0..9}.tar",
    'pipe:curl -H "X-Api-Key: hunter2" https://h/{0..9}.tar',
    "pipe:curl -u me:hunter2 https://h/{0..9}.tar",
    "pipe:AWS_SECRET_ACCESS_KEY=hunter2 aws s3 cp s3://b/{0..9}.tar -",
    "pipe:fetch --password hunter2 {0..9}.tar",
    "https://h/{0..9}.tar?key=hunter2",
    "https://h/{0..9}.tar?a=1&auth=hunter2",
    "https://h/{0..9}.tar?jwt=hunter2&a=1",
    "https://h/{0..9}.tar?subscription-key=hunter2",
    "pipe:curl 'https://h/{0..9}.tar?session_id=hunter2'",
    "pipe:curl ftp://me:hunter2@host/{0..9}.tar",
]
HARMLESS = [
    "https://host:8080/secret-bucket/{0..9}.tar?download=true&page=7",
    "https://h/{0..9}.tar?keyword=dog&author=me&sort=key&key=$KEY&auth=${AUTH}",
    "https://$USER:$PASS@host/{0..9}.tar?token=$TOKEN&X-Amz-Signature=${SIG}",
    'pipe:curl -H "Authorization: Bearer $TOKEN" -u me:$PASS https://h/{0..9}.tar',
    "pipe:AWS_SECRET_ACCESS_KEY=$(cat key) aws s3 cp s3://tokens/{0..9}.tar -",
    "pipe:cat /data/tokens {0..9}.tar",
    "pipe:ssh -p 22 me@host cat {0..9}.tar",
    "pipe:fetch --password $PASS --token-file f {0..9}.tar",
    "/data/passwords/{0..9}.tar",
]


@pytest.mark.parametrize("text", WRITTEN_OUT)
def test_literal_secret_is_refused_and_not_repeated(
    text: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match=r"write .*\$NAME .* environment variable") as caught:
        refuse_secret(text)
    assert "hunter2" not in str(caught.value) + redact(text)
    assert redact(text).replace("***", "hunter2") in (text, text.replace("hunter2:", ""))
    for override in (
        f"data.shards={text}",
        f"eval.labeled.x={text}",
        f"data.sources=[{{shards: {text!r}}}]",
        f"deepspeed.comet={{workspace: {text!r}}}",
        f"loss.options={{a: {{b: [1, {text!r}]}}}}",
        text,
    ):
        assert main(["train", "--dry-run", "--config", "quickstart", override]) == 2
        said = "".join(capfd.readouterr())
        assert said.startswith("error")
        assert "hunter2" not in said


@pytest.mark.parametrize("text", HARMLESS)
def test_text_without_a_secret_stays_as_it_is_and_in_config_yaml(text: str, tmp_path: Path) -> None:
    assert refuse_secret(text) == redact(text) == text
    config = load_config("quickstart", [f"data.shards={text!r}"])
    path = tmp_path / "again.yaml"
    path.write_text(config.to_yaml())
    assert load_config(path) == config


def test_variables_are_expanded_in_both_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISCO_TEST_SECRET", "a$b")
    assert expand("x?t=$DISCO_TEST_SECRET&u=${DISCO_TEST_SECRET}/{0..9}") == "x?t=a$b&u=a$b/{0..9}"
    with pytest.raises(ValueError, match="DISCO_TEST_NONE is not set"):
        expand("$DISCO_TEST_NONE")
