"""A checkpoint's tokenizer, from wherever the checkpoint says it is."""

from verispec.errors import ModelFileError
from verispec.model.checkpoint import GGUFTokenizerSource, TokenizerSource
from verispec.model.folder_tokenizer import tokenizer_from_folder
from verispec.model.gguf_tokenizer import tokenizer_from_gguf
from verispec.model.tokenizer import Tokenizer


def load_tokenizer(source: TokenizerSource) -> Tokenizer:
    if isinstance(source, GGUFTokenizerSource):
        try:
            return tokenizer_from_gguf(source.metadata)
        except ModelFileError as error:  # which names the key; metadata does not know its file
            raise type(error)(f"{source.path}: {error}") from error
    return tokenizer_from_folder(source.folder)
