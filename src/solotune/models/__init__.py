"""Decoders by family, and `auto` for a model folder."""

from solotune.models.attention import Context as Context
from solotune.models.attention import KVCache as KVCache
from solotune.models.auto import auto as auto
from solotune.models.auto import check_same_model as check_same_model
from solotune.models.auto import read_config as read_config
from solotune.models.decoder import Block as Block
from solotune.models.decoder import Decoder as Decoder
from solotune.models.llama import llama2_7b as llama2_7b
from solotune.models.llama import llama2_13b as llama2_13b
from solotune.models.llama import llama2_70b as llama2_70b
from solotune.models.llama import llama3_1_8b as llama3_1_8b
from solotune.models.llama import llama3_1_70b as llama3_1_70b
from solotune.models.llama import llama3_1_405b as llama3_1_405b
from solotune.models.llama import llama3_2_1b as llama3_2_1b
from solotune.models.llama import llama3_2_3b as llama3_2_3b
from solotune.models.llama import llama3_3_70b as llama3_3_70b
from solotune.models.llama import llama3_8b as llama3_8b
from solotune.models.llama import llama3_70b as llama3_70b
from solotune.models.llama import smollm2_1_7b as smollm2_1_7b
from solotune.models.llama import smollm2_135m as smollm2_135m
from solotune.models.llama import smollm2_360m as smollm2_360m
