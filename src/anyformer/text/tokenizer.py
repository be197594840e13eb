"""Tokenizers: text to ids and back, exactly. The names that other parts use; each file of this folder is one kind."""

from anyformer.text.backend import BackendTokenizer
from anyformer.text.base import ByteTokenizer, Frame, TextStream, Tokenizer, well_formed
from anyformer.text.bpe import BPETokenizer
from anyformer.text.gguf_tokenizer import gguf_tokenizer
from anyformer.text.hub import load_tokenizer
from anyformer.text.pieces import SentencePieceTokenizer

__all__ = [
    "BPETokenizer",
    "BackendTokenizer",
    "ByteTokenizer",
    "Frame",
    "SentencePieceTokenizer",
    "TextStream",
    "Tokenizer",
    "gguf_tokenizer",
    "load_tokenizer",
    "well_formed",
]
