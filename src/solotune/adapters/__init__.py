"""Adapters over frozen weights, injected into a built model, and weights in 4 bits."""

from solotune.adapters.inject import adapt_layer as adapt_layer
from solotune.adapters.inject import adaptable_layers as adaptable_layers
from solotune.adapters.inject import adapted_layers as adapted_layers
from solotune.adapters.inject import adapter_lines as adapter_lines
from solotune.adapters.inject import adapter_parameters as adapter_parameters
from solotune.adapters.inject import check_no_new_tokens as check_no_new_tokens
from solotune.adapters.inject import initialize as initialize
from solotune.adapters.inject import inject as inject
from solotune.adapters.inject import is_adapter as is_adapter
from solotune.adapters.inject import merged_weight as merged_weight
from solotune.adapters.inject import target_names as target_names
from solotune.adapters.lora import LoRA as LoRA
from solotune.adapters.lora_layers import Addition as Addition
from solotune.adapters.nf4 import FourBit as FourBit
from solotune.adapters.nf4_linear import NF4Linear as NF4Linear
from solotune.adapters.nf4_linear import four_bit_linears as four_bit_linears
from solotune.adapters.nf4_linear import quantize_linears as quantize_linears
