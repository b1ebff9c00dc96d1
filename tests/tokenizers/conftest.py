"""Published tokenizers, one after the other."""

import pytest

from tests.tokenizers.published import Published, llama3, mistral, qwen, tekken


@pytest.fixture(scope="session", params=["llama3", "qwen", "tekken", "mistral-v1", "mistral-v3"])
def published(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Published:
    """Each published tokenizer in turn, as a folder with a chat template."""
    folder = tmp_path_factory.mktemp(request.param)
    match request.param:
        case "llama3":
            return llama3(folder)
        case "qwen":
            return qwen(folder)
        case "tekken":
            return tekken(folder)
        case "mistral-v1":
            return mistral(request.param, "tokenizer.model.v1", folder)
        case _:
            name = "mistral_instruct_tokenizer_240323.model.v3"
            return mistral(request.param, name, folder)
