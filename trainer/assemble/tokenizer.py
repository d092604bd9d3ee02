"""Build the tokenizer of a run for the parts that take one."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, final

from trainer.assemble.instantiate import construct, look_up
from trainer.config.components import Component
from trainer.config.run_config import RunConfig
from trainer.core.errors import ConfigError
from trainer.models.facts import model_library

_ANY = ("auto", "bytes")
"""Options that go with data which give tokens, or bytes, of their own."""


@final
class RunTokenizer:
    """The tokenizer of a run, built once, for the first part that names an argument `tokenizer`."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self.built: Any = None  # None until a part takes it

    def given_to(self, component: Component, key: str) -> Mapping[str, Any]:
        """Give the argument `tokenizer` of a component, if its constructor takes one."""
        config = self._config
        target = look_up(component, key, config.trust)
        if "tokenizer" not in inspect.signature(target).parameters:
            return {}
        if self.built is None:
            given = {"model": source_of_model(config)}
            self.built = construct(config.tokenizer, "tokenizer", object, config.trust, given)
        if tokens := getattr(target, "special_tokens", ()):
            self.built.add_tokens([*tokens], special_tokens=True)
        return {"tokenizer": self.built}

    def refuse_unused(self) -> None:
        """Refuse a tokenizer that was typed and that no part takes, so that it does nothing."""
        config = self._config
        name = config.tokenizer.name or config.tokenizer.target
        path = config.tokenizer.params.get("path")
        if self.built is None and (name not in _ANY or path is not None):
            data = config.data.name or config.data.target
            typed = f"tokenizer.path={path}" if name in _ANY else f"tokenizer={name}"
            raise ConfigError(
                f"{typed}: data={data} takes no tokenizer; type data=hf, or leave it out"
            )


def source_of_model(config: RunConfig) -> str | None:
    """Name what the model is loaded from, or configured by; None where it is neither."""
    params = config.model.params
    paths = (params.get("path"), params.get("config"), model_library().source_in(params))
    return next((path for path in paths if isinstance(path, str)), None)
