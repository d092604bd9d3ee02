"""Which objective a model gets where none was typed."""

import pytest
import torch
from torch import Tensor, nn

from tests.lib.config_support import checked
from tests.lib.heads import Examples, Head
from trainer.assemble.data_sets import RunTokenizer
from trainer.assemble.objective import fitting_objective
from trainer.core.errors import ConfigError
from trainer.core.micro_batch import Fields
from trainer.data.loader import Loader, Request
from trainer.models.bind import bind
from trainer.objectives.base import sums_of, weights_of

pytestmark = pytest.mark.filterwarnings("ignore")
TOKENIZER = RunTokenizer(checked({}))


def fields_of(kind: str, ids: tuple[int, ...] = (0, 1, 2, 3)) -> Fields:
    """Give some of four ragged samples, padded to the longest of them."""
    data = Examples(kind)
    pad_to = max(int(data.lengths[i]) for i in ids)
    return Loader(data, num_workers=0, seed=0).load(Request(ids, 0, pad_to))


@pytest.mark.parametrize(
    ("text", "head"),
    [
        ("next_token", Head("GPT2LMHeadModel", "GPT2Config", "causal")),
        ("token_classify", Head("BertForMaskedLM", "BertConfig", "masked")),
        ("token_classify", Head("BertForTokenClassification", "BertConfig", "tags")),
        ("classify", Head("BertForSequenceClassification", "BertConfig", "class")),
        ("multiple_choice", Head("BertForMultipleChoice", "BertConfig", "choice")),
        ("seq2seq", Head("T5ForConditionalGeneration", "T5Config", "tagged words")),
        (
            "question_answering",
            Head("BertForQuestionAnswering", "BertConfig", "span", {"num_labels": 2}),
        ),
        (
            "regression",
            Head("BertForSequenceClassification", "BertConfig", "class", {"num_labels": 1}),
        ),
    ],
    ids=lambda case: getattr(case, "name", None),
)
def test_the_loss_is_the_one_that_transformers_computes_on_ragged_samples(text, head):
    torch.manual_seed(0)
    module, fields = head.build().double().eval(), fields_of(head.data)
    if head.values == {"num_labels": 1}:
        fields["labels"] = fields["labels"].double()
    chosen = fitting_objective(checked({}), module, fields, TOKENIZER)
    assert chosen.text.partition(",")[0] == text
    weights, call = weights_of(chosen.objective, fields), bind(module)
    sums = sums_of(chosen.objective, call, fields, weights).losses
    ours = sum(float(loss) / weights[name] for name, loss in sums.items())
    theirs = float(call(fields).loss)
    if head.data == "span":  # of each sample alone: in theirs an answer may lie in the padding
        theirs = float(sum(call(fields_of("span", (i,))).loss for i in range(4))) / 4
    assert ours == pytest.approx(theirs, rel=1e-6)  # their float32


class Tagger(nn.Module):
    """Gives a class per token, and does not say so."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(19, 19)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.table(input_ids)


class Declared(Tagger):
    task = "token_classification"


def test_a_model_that_says_nothing_is_judged_by_its_labels():
    def text(kind: str, module: nn.Module) -> str:
        return fitting_objective(checked({}), module, fields_of(kind), TOKENIZER).text

    assert text("causal", Tagger()) == "next_token, as the labels are the tokens themselves"
    assert text("class", Tagger()) == "classify, as the data give one label per sample"
    why = "as the model is made for token_classification"
    assert text("tags", Declared()) == f"token_classify, {why}"
    for kind in ("tags", "span"):
        with pytest.raises(ConfigError, match="Tagger does not say what it is made for: type obj"):
            text(kind, Tagger())


def test_settings_reach_the_objective_that_is_chosen_or_are_refused():
    fields = fields_of("class")
    config = checked({"objective.label_smoothing": 0.1})
    component = fitting_objective(config, Tagger(), fields, TOKENIZER).component
    assert component.params["label_smoothing"] == 0.1
    with pytest.raises(ConfigError, match=r"^objective\.z_loss: Classify takes no such argument"):
        fitting_objective(checked({"objective.z_loss": 0.1}), Tagger(), fields, TOKENIZER)
