"""What looks like a secret is neither recorded nor shown, and what does not is left alone."""

from trainer.config.messages import clip, line
from trainer.config.secrets import is_secret, leaked, without_secrets

ENVIRONMENT = {
    **{"DB_PASSWORD": "Canaryshort2", "MYSQL_PWD": "canary6", "REGISTRY_AUTH": "canary8"},
    **{"hf_token_lower": "canarylowercase4444444", "GH_PAT": "canarypatpatpatpatpat5"},
    "DATABASE_URL": "postgres://user:Canaryurlpw3%21@host/db",
    "SENTRY_DSN": "https://canary7canary7@sentry/1",
}
HARMLESS = {
    **{"PWD": "/home/canary", "OLDPWD": "/home/other", "SSH_AUTH_SOCK": "/tmp/canary"},
    **{"TOKENIZERS_PARALLELISM": "disabled", "MAX_TOKENS": "100000", "KEYMAP": "german"},
    **{"XDG_SESSION_TYPE": "canary-session", "PATH": "/usr/bin:/bin", "DB_SECRET": "train"},
}


def quoted(environ: dict[str, str]) -> str:
    return "said: " + ", ".join(environ.values())


def test_secrets_of_the_environment_are_named_and_not_shown():
    shown = without_secrets(quoted(ENVIRONMENT), ENVIRONMENT)
    assert "canary" not in shown.lower(), shown
    assert "$DB_PASSWORD" in shown
    assert "postgres://user:$DATABASE_URL@host/db" in shown
    for name, value in ENVIRONMENT.items():
        assert leaked(f"x-{value}", ENVIRONMENT) == name


def test_folders_words_and_numbers_of_the_environment_are_shown():
    assert without_secrets(quoted(HARMLESS), HARMLESS) == quoted(HARMLESS)
    assert all(leaked(value, HARMLESS) is None for value in HARMLESS.values())


SECRET_TEXTS = [
    "postgres://me:Canary1word@host/db",
    "https://Canary2canary2canary2@host/x",
    "Authorization: Bearer Canary3canary3",
    '{"Authorization": "Basic Canary4="}',
    "Server=x;Password=Canary5;Port=1",
    "https://h/x?access_token=Canary6&y=1",
    "https://h/x?X-Amz-Signature=Canary7",
    "apiToken=Canary8: refused",
    "{'client_secret': 'Canary9'}",
    "hf_Canary" + "0a" * 16,
    "-----BEGIN RSA PRIVATE KEY----- Canary0",
]


def test_a_secret_is_known_by_its_form():
    for text in SECRET_TEXTS:
        assert is_secret("x", text)
        assert "Canary" not in without_secrets(text, {})
        assert "Canary" not in clip(f"{text} {'long ' * 99}")
        assert "Canary" not in line("key", text + "y" * 60, "must be a number")


PLAIN_TEXTS = [
    "model.eos_token=end: must be a number",
    "optimizer.lr=1e-3 key=value accum.max_tokens=4096",
    "https://user@host/x git@github.com:a/b.git s3://bucket/key",
    "data.password: looks like a secret, and settings are written",
    "Bearer of bad news: password: must be given; password=$DB_PASSWORD token=***",
    "/home/me/secret/key.json in passwords.py, line 3",
]


def test_what_only_sounds_like_a_secret_is_shown():
    for text in PLAIN_TEXTS:
        assert without_secrets(text, {}) == text


def test_a_setting_is_known_by_its_name():
    named = ("apiToken", "Authorization", "hf_token", "dbPassword")
    assert all(is_secret(name, "x") for name in named)
    harmless = [("key", "input_ids"), ("key_size", 4), ("eos_token", "end"), ("auth", True)]
    harmless += [("pwd", "/data/v2/set1"), ("auth", "basic"), ("max_tokens", 4096), ("token", None)]
    assert not [pair for pair in harmless if is_secret(*pair)]
