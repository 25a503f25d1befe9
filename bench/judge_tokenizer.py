"""A tokenizer of bytes in Hugging Face's form, for judges that need one: python judge_tokenizer.py FOLDER"""

import sys

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

found = Tokenizer(models.BPE({letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
found.decoder = decoders.ByteLevel()
PreTrainedTokenizerFast(tokenizer_object=found, bos_token="!", eos_token="!").save_pretrained(sys.argv[1])
