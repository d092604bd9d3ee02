"""Run what starts no run: help, recipes, views, commands of features."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from trainer.cli.feature_commands import feature_commands
from trainer.config.messages import clip
from trainer.core.errors import ConfigError


def show_page(word: str, settings: Sequence[str], own_folder: str | None) -> None:
    """Print the help, where a view of runs was written, or one of `PAGES`; or run a feature's."""
    if word in feature_commands():
        feature_commands()[word].run(word, settings)
        return
    if word == "help":
        from trainer.cli import help_page  # noqa: PLC0415 - imports Hydra

        help_page.print_help(own_folder)
        return
    if word not in PAGES:
        from trainer.cli.view_command import show_runs  # noqa: PLC0415 - for these alone

        print(show_runs(word, settings))  # noqa: T201 - where the file is
        return
    if settings:
        raise ConfigError(clip(f"{settings[0]}: train {word} takes no settings; leave it out"))
    for line in PAGES[word]():
        print(line)  # noqa: T201 - a page


def _recipes() -> Iterator[str]:
    """Give each recipe with its purpose, its cost and the result to expect."""
    from trainer.config import recipes  # noqa: PLC0415 - imports Hydra

    for name in recipes.available():
        yield f"recipe={name}"
        if path := recipes.path_of(name):
            for key, value in recipes.about(path).items():
                yield f"  {key:<10}{value}"
    variable = recipes.FOLDERS_VARIABLE
    yield f"your own: NAME.yaml in a folder on {variable}, or recipe=path/to/file.yaml"


PAGES: Mapping[str, Callable[[], Iterator[str]]] = {"recipes": _recipes}
