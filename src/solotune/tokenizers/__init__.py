"""Tokenizers and chat templates: text to token ids, and which of them the model is trained on."""

from solotune.tokenizers.chat_template import CHATML, ChatTemplate, Message, Rendering, Turn
from solotune.tokenizers.encoded import EncodedText
from solotune.tokenizers.tokenizer import Tokenizer, auto, check_vocabulary

__all__ = [
    "CHATML",
    "ChatTemplate",
    "EncodedText",
    "Message",
    "Rendering",
    "Tokenizer",
    "Turn",
    "auto",
    "check_vocabulary",
]
