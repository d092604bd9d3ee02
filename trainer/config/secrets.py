"""Recognise secrets: by their name, by their own form, or because the environment holds them.

Rules of thumb: a name says what its value is, and only tokens of well-known services are known by
their form. A secret that is one plain short word, or a number of a few digits, looks like the words
and numbers that configs are made of, and passes.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache, partial

MASK = "***"

_VARIABLE = re.compile(
    r"KEY|TOKEN(?!S|IZ)|SECRET|PASSW|PASSPHRASE|CREDENTIAL|(^|_)(PAT|PASS|PWD|AUTH|DSN)(_|$)",
    re.IGNORECASE,
)
_SHORTEST = 6  # characters from which the value of such a variable is a secret

_COMMON = re.compile(r"[A-Za-z]([a-z]{,9}|[A-Z]{,9})|[\d.,]{,7}|[~.]{,2}/.*", re.DOTALL)
"""Words, small numbers and paths: too common to be looked for in texts."""

_WORDS = (
    r"(?:\w*(?:password|passwd|passphrase|secret|credentials?|api_?key)"
    r"|(?:\w*_)?(?:access|private|secret|account)_?key"
    r"|(?:\w*_)?(?:api|auth|access|bearer|refresh|session|hf|hub|wandb|gh|github|gitlab)_?token)"
)
_NAME = re.compile(rf"{_WORDS}|token|\w*authorization", re.IGNORECASE)
_TOKEN = re.compile(
    r"\b(hf_[A-Za-z0-9]{30,}|gh[pousr]_[A-Za-z0-9]{30,}|github_pat_\w{30,}|sk-([a-z]+-)?\w{20,}"
    r"|AKIA[0-9A-Z]{16}|xox[abprs]-[\w-]{10,}|wandb_v1_\w{20,}|AIza[\w-]{35})\b"
    r"|-----BEGIN [\s\S]*?(-----END [^-]*-----|$)"
)
_AFTER = re.compile(
    r"(\w://[^/\s:@]*:)(?![$*])[^/\s@]+(?=@)"  # a password in an address
    r"|(\w://)(?![$*])[^/\s:@]{12,}(?=@)"  # a token in one
    r"|(\b(?:bearer|basic)\s+)(?=\S*\d)[\w.~+/=-]{8,}"
    # What is masked already, or names a variable, stays.
    rf"|(\b(?:{_WORDS}|[\w-]*signature|sig|token)=)(?![$*'\"/])[^\s&;,'\"]+?(?=:?(?:[\s&;,'\"]|$))"
    rf"|(['\"]{_WORDS}['\"]\s*:\s*['\"])(?![$*])[^'\"]+",
    re.IGNORECASE,
)


def is_secret(name: str, value: object) -> bool:
    """Whether a setting, by the last part of its key, looks like a secret, no collection opened."""
    if value in (None, "", "null") or isinstance(value, bool):
        return False
    text = ""
    if not isinstance(value, Mapping | list | tuple | set | frozenset):
        text = str(value)
    return any((_NAME.fullmatch(name), _TOKEN.search(text), _AFTER.search(text)))


def leaked(value: object, environ: Mapping[str, str]) -> str | None:
    """Name the environment variable whose secret a value holds, or None."""
    text = str(value)
    for secret, name in _secrets(environ):
        if secret in text:
            return name
    return None


def without_secrets(text: str, environ: Mapping[str, str]) -> str:
    """Copy a text without its secrets; those of `environ` give way to their variables' names."""
    # The longest first, for a shorter one may be a part of it.
    for secret, name in sorted(_secrets(environ), key=lambda pair: -len(pair[0])):
        text = text.replace(secret, f"${name}")
    text = _AFTER.sub(lambda found: f"{found[found.lastindex or 0]}{MASK}", text)
    return _TOKEN.sub(MASK, text)


def mask_logs() -> None:
    """Let what any library logs from now on, tracebacks too, reach no handler with a secret."""

    def masked(inner: Callable[[logging.LogRecord], str], record: logging.LogRecord) -> str:
        return without_secrets(inner(record), os.environ)

    for handler in logging.getLogger().handlers:
        handler.format = partial(masked, handler.format)  # type: ignore[method-assign]


def _secrets(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Give each secret of an environment, and its variable's name."""
    for name, value in environ.items():
        yield from ((secret, name) for secret in _secrets_of(name, value))


# A run asks some hundred times.
@lru_cache(maxsize=1000)
def _secrets_of(name: str, value: str) -> tuple[str, ...]:
    # Proxies and databases have their password within an address, whatever the variable's name.
    found = {*re.findall(r"\w://[^/\s:@]*:([^/\s@]+)@", value)}
    if _VARIABLE.search(name):
        found.add(value)
    secrets = list[str]()
    for secret in found:
        # What is as short or as common as this would be masked in every text.
        if len(secret) >= _SHORTEST and not _COMMON.fullmatch(secret):
            secrets.append(secret)
    return tuple(secrets)
