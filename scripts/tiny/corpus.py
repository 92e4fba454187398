"""Text of the running Python, split and tokenized: documents, chats, the token streams."""

from __future__ import annotations

import ast
import hashlib
import itertools
import json
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SEED = 20260521
END, TURN, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
MASK, PAD = "<|mask|>", "<|pad|>"
SPECIAL = [END, TURN, TURN_END, MASK, PAD]
VOCABULARY = 3072
HELD_OUT_PER_MILLE = 25
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SYSTEM_LINE = "You are a helpful assistant."
SKIPPED = ("site-packages/", "lib2to3/tests/data/", "encodings/", "pydoc_data/", "test/badsyntax")
LARGEST_FILE = 320_000


@dataclass(frozen=True)
class Document:
    """One text with the name that decides on its side of the split."""

    name: str
    text: str

    @property
    def held_out(self) -> bool:
        """Whether the text is kept for evaluation: a hash of its name decides."""
        digest = hashlib.sha256(self.name.encode()).digest()
        return int.from_bytes(digest[:4], "big") % 1000 < HELD_OUT_PER_MILLE


def library_documents() -> list[Document]:
    """The standard library's Python files and its language reference topics, ordered by name."""
    root = Path(sysconfig.get_path("stdlib"))
    found = [doc for path in sorted(root.rglob("*.py")) if (doc := _read(root, path)) is not None]
    from pydoc_data.topics import topics

    found += [Document(f"pydoc_data/topics/{key}", topics[key]) for key in sorted(topics)]
    return found


def _read(root: Path, path: Path) -> Document | None:
    name = path.relative_to(root).as_posix()
    if any(part in name for part in SKIPPED) or path.stat().st_size > LARGEST_FILE:
        return None
    try:
        text = path.read_bytes().decode()
    except UnicodeDecodeError:
        return None
    return Document(name, text) if text.strip() else None


def chat(user: str, answer: str, system: bool) -> str:
    """One exchange in the form that CHAT_TEMPLATE renders, ended as a completion should end."""
    head = f"{TURN}system\n{SYSTEM_LINE}{TURN_END}\n" if system else ""
    return f"{head}{TURN}user\n{user}{TURN_END}\n{TURN}assistant\n{answer}{TURN_END}\n"


def chats_of(doc: Document) -> Iterator[str]:
    """Questions and answers made from a file's documented functions, or from a topic."""
    if doc.name.startswith("pydoc_data/"):
        paragraphs = doc.text.strip().split("\n\n")
        topic = doc.name.rsplit("/", 1)[1]
        yield chat(f"Explain the topic {topic} of Python.", "\n\n".join(paragraphs[:3]), False)
        return
    try:
        tree = ast.parse(doc.text)
    except (SyntaxError, ValueError):
        return
    module = doc.name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from _chats_of_node(doc.text, module, node)


def _chats_of_node(
    text: str, module: str, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
) -> Iterator[str]:
    docstring = ast.get_docstring(node)
    if not docstring:
        return
    kind = "class" if isinstance(node, ast.ClassDef) else "function"
    first = docstring.split("\n\n")[0].replace("\n", " ")
    forms = int.from_bytes(hashlib.sha256(f"{module}.{node.name}".encode()).digest()[:2], "big")
    asked = (
        f"What does the {kind} {node.name} of {module} do?",
        f"Explain {module}.{node.name}.",
        f"What is {node.name}?",
    )[forms % 3]
    yield chat(asked, docstring, forms % 5 == 0)
    source = ast.get_source_segment(text, node, padded=False)
    if kind == "function" and source and len(source) < 1500:
        code = _dedent_tail(source, node.col_offset)
        wanted = (
            f"Write a Python function {node.name}: {first}",
            f"Write {node.name} in Python. {first}",
            f"{first} Show me the code of {node.name}.",
        )[forms % 3]
        yield chat(wanted, f"```python\n{code}\n```", forms % 7 == 0)


def _dedent_tail(source: str, columns: int) -> str:
    """Source of a nested definition with its indentation taken from the lines after the first."""
    first, *rest = source.split("\n")
    margin = " " * columns
    return "\n".join([first, *(line.removeprefix(margin) for line in rest)])


def split_texts(documents: list[Document]) -> tuple[list[str], list[str]]:
    """(training texts with chats, in shuffled order; held-out texts, in order of their names)."""
    training = [doc.text for doc in documents if not doc.held_out]
    single = [turn for doc in documents if not doc.held_out for turn in chats_of(doc)]
    shuffler = np.random.default_rng([SEED, 1])
    order = shuffler.permutation(len(single))[: len(single) * 2 // 5]
    groups = ["".join(single[i] for i in part) for part in np.array_split(order, len(order) // 8)]
    mixed = training + groups
    shuffled = [mixed[i] for i in shuffler.permutation(len(mixed))]
    return shuffled, [doc.text for doc in documents if doc.held_out]


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """A byte-level BPE without normalisation: decoding an encoding gives back the same bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def token_stream(tokenizer: Tokenizer, texts: list[str]) -> np.ndarray:
    """All texts as one row of token ids, each text closed by END."""
    end = tokenizer.token_to_id(END)
    encoded = tokenizer.encode_batch(texts, add_special_tokens=False)
    return np.fromiter(itertools.chain.from_iterable((*e.ids, end) for e in encoded), np.uint16)


def stage_corpus(work: Path) -> None:
    """Write tokenizer.json, train.npy, held_out.npy and split.json."""
    work.mkdir(parents=True, exist_ok=True)
    documents = library_documents()
    training, held_out = split_texts(documents)
    tokenizer = train_tokenizer(training)
    tokenizer.save(str(work / "tokenizer.json"))
    sizes: dict[str, int] = {"vocabulary": tokenizer.get_vocab_size()}
    for name, texts in (("train", training), ("held_out", held_out)):
        stream = token_stream(tokenizer, texts)
        np.save(work / f"{name}.npy", stream)
        sizes[f"{name}_texts"] = len(texts)
        sizes[f"{name}_bytes"] = sum(len(text.encode()) for text in texts)
        sizes[f"{name}_tokens"] = len(stream)
    (work / "split.json").write_text(json.dumps(sizes, indent=1))
    (work / "held_out.json").write_text(json.dumps(held_out))
    print(json.dumps(sizes))
