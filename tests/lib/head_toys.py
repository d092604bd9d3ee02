"""What heads other than those for the next token need beside a model."""

from types import SimpleNamespace

from tests.lib.run_toys import VOCABULARY


class Tokens(SimpleNamespace):
    """A tokenizer, of which only the names of its special tokens matter."""

    def __init__(self) -> None:
        super().__init__(mask_token_id=3, pad_token_id=0, all_special_ids=[0, 1, 3])

    def __len__(self) -> int:
        return VOCABULARY
