# ruff: noqa: RUF001 (DeepSeek's control tokens are written with full-width bars)
"""The chat templates of the trl wheel, and by which rules each of them writes an assistant's turn.

`RULES` is written down from reading the templates, not computed: what inference would see.
"""

import importlib.util
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

Message = dict[str, Any]

spec = importlib.util.find_spec("trl")  # not imported: it would bring torch and more
if spec is None or spec.origin is None:
    pytest.skip("needs the templates of the trl wheel", allow_module_level=True)
FOLDER = Path(spec.origin).parent / "chat_templates"
NAMES = sorted(path.stem for path in FOLDER.glob("*.jinja"))
TWINS = {name.removesuffix("_training"): name for name in NAMES if name.endswith("_training")}
PLAIN = [name for name in NAMES if name not in TWINS.values()]

# Texts that the templates write as control tokens.
CONTROL = re.compile(
    r"<\|[\w\"/]+\|>|<｜[^｜<> \n]+\｜>|</?s>|<(?:start|end)_of_\w+>|<image>|\[gMASK\]|<sop>"
    r"|<\|(?:turn|channel|think|tool|tool_call|tool_response)>"
    r"|<(?:turn|channel|tool|tool_call|tool_response)\|>"
)


def keep(text: str) -> str:
    """The text as it stands."""
    return text


def call_json(key: str = "arguments", before: str = "{", after: str = "}") -> Callable[..., str]:
    """A call as JSON, its arguments under `key`."""

    def write(name: str, arguments: dict[str, Any]) -> str:
        return (
            f'{before}"name": "{name}", "{key}": {json.dumps(arguments, ensure_ascii=False)}{after}'
        )

    return write


def call_xml(name: str, arguments: dict[str, Any]) -> str:
    """A call in the tags that Qwen3.5 and Nemotron 3 use."""
    values = "".join(
        f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items()
    )
    return f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>"


def call_glm(name: str, arguments: dict[str, Any]) -> str:
    """GLM's tags."""
    pairs = "".join(
        f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n"
        for key, value in arguments.items()
    )
    return f"<tool_call>{name}\n{pairs}</tool_call>"


def call_python(name: str, arguments: dict[str, Any]) -> str:
    """LFM2's call, like Python."""
    values = ", ".join(
        f"{key}='{value}'" if isinstance(value, str) else f"{key}={value}"
        for key, value in arguments.items()
    )
    return f"<|tool_call_start|>[{name}({values})]<|tool_call_end|>"


def call_gemma(name: str, arguments: dict[str, Any]) -> str:
    """Gemma 4's call; keys in order of the alphabet."""
    values = ",".join(
        f'{key}:<|"|>{value}<|"|>' if isinstance(value, str) else f"{key}:{value}"
        for key, value in sorted(arguments.items())
    )
    return f"<|tool_call>call:{name}{{{values}}}<tool_call|>"


def call_deepseek(name: str, arguments: dict[str, Any]) -> str:
    """DeepSeek's call, its arguments as JSON text in a code block."""
    return (
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n"
        f"```json\n{json.dumps(arguments, ensure_ascii=False)}\n```<｜tool▁call▁end｜>"
    )


def call_harmony(name: str, arguments: dict[str, Any]) -> str:
    """gpt-oss's call."""
    text = json.dumps(arguments, ensure_ascii=False)
    return f" to=functions.{name}<|channel|>commentary json<|message|>{text}"


def call_atem(name: str, arguments: dict[str, Any]) -> str:
    """Muse Glimmer's call."""
    values = "".join(
        f'<atem:parameter name="{key}">{value}</atem:parameter>\n'
        for key, value in arguments.items()
    )
    return (
        f' to={name}<|message|><atem:function_calls>\n<atem:invoke name="{name}">\n{values}'
        "</atem:invoke>\n</atem:function_calls>"
    )


@dataclass(frozen=True)
class Rules:
    """What a template makes of an assistant's turn that stands at the end.

    `ends`: the ids of generation_config.json as texts, `[0]` is EOS. `text`: what it keeps of a
    content; `opening` and `closing`: what inference leaves to the model around it. `reasoning`:
    what stands for a turn with reasoning, `{r}`, and content, `{c}`; None: it does not render it.
    `divides`: it takes what stands before `</think>` in a content as reasoning. `call`: what it
    writes for a call; None: it does not render it. `call_closing`: what ends a call. `parts`:
    content is a list of parts. `alternates`: other orders of roles are refused. `system`: it takes
    a system message. `strange`: texts that it treats in ways of its own. `arguments_as_text`,
    `empty_content`: how it wants the arguments and the content of a call.
    """

    ends: tuple[str, ...]
    text: Callable[[str], str] = keep
    opening: str = ""
    closing: str = ""  # empty: the first of `ends`
    reasoning: str | None = None
    divides: bool = False
    call: Callable[..., str] | None = None
    call_closing: str = ""  # empty: as `closing`
    parts: bool = False
    alternates: bool = False
    system: bool = True
    strange: tuple[str, ...] = ()
    arguments_as_text: bool = False
    empty_content: str | None = ""


CHATML = Rules(("<|im_end|>", "<|endoftext|>"))
QWEN25 = replace(CHATML, call=call_json(before="<tool_call>\n{", after="}\n</tool_call>"))
QWEN3 = replace(
    QWEN25,
    text=lambda text: text.lstrip("\n"),
    reasoning="<think>\n{r}\n</think>\n\n{c}",
    divides=True,
    strange=("<tool_response>",),
)
QWEN35 = replace(
    QWEN3,
    text=str.strip,
    reasoning="{r}\n</think>\n\n{c}",
    call=call_xml,
    strange=("<tool_response>",),
)
NEMOTRON = replace(
    CHATML,
    text=str.rstrip,
    reasoning="{r}\n</think>\n{c}",
    divides=True,
    call=lambda *call: call_xml(*call) + "\n",
)
NEMOTRON_TIGHT = replace(NEMOTRON, reasoning="{r}</think>{c}")
GEMMA = Rules(("<eos>", "<end_of_turn>"), str.strip, closing="<end_of_turn>", alternates=True)
GEMMA4 = Rules(
    ("<eos>", "<turn|>", "<|tool_response>"),
    str.strip,
    closing="<turn|>",
    call=call_gemma,
    call_closing="<|tool_response>",
    strange=("<|channel>", "<channel|>"),
)
LFM2 = Rules(("<|im_end|>",))
LFM25 = replace(
    LFM2,
    closing="<|im_end|>\n",  # its own generation block holds the line break
    reasoning="<think>{r}</think>{c}",
    call=call_python,
    strange=("</think>", "CONTINUE_FINAL_MESSAGE_TAG "),
)
LLAMA3 = Rules(("<|eot_id|>", "<|end_of_text|>", "<|eom_id|>"), str.strip)
LLAMA31 = replace(LLAMA3, call=call_json("parameters"))
PARTS = Rules(("<end_of_utterance>",), opening=" ", parts=True)
PHI3 = Rules(("<|endoftext|>", "<|end|>"), closing="<|end|>")
COHERE = Rules(("<|END_OF_TURN_TOKEN|>",), str.strip, alternates=True)
DEEPSEEK = Rules(
    ("<｜end▁of▁sentence｜>",),
    call=call_deepseek,
    call_closing="<｜tool▁calls▁end｜><｜end▁of▁sentence｜>",
    strange=("</think>",),
    arguments_as_text=True,
)

RULES: dict[str, Rules] = {
    "cohere": COHERE,
    "cohere2": replace(COHERE, text=keep, closing="<|END_RESPONSE|><|END_OF_TURN_TOKEN|>"),
    "deepseek_r1_distill": replace(
        DEEPSEEK, call_closing="<｜end▁of▁sentence｜>", empty_content=None
    ),
    "deepseekv3": DEEPSEEK,
    "diffusion_gemma": replace(GEMMA4, reasoning="<|channel>thought\n{r}\n<channel|>{c}"),
    "gemma": replace(GEMMA, system=False),
    "gemma3": GEMMA,
    "gemma4": GEMMA4,
    "gemma4_v2": replace(GEMMA4, call_closing="<turn|>"),
    "gemma4_v3": GEMMA4,
    "gemma4_v4": GEMMA4,
    "gemma4_v5": replace(GEMMA4, reasoning="<|channel>thought\n{r}\n<channel|>{c}"),
    "glm4moe": Rules(
        ("<|endoftext|>", "<|user|>", "<|observation|>"),
        str.strip,
        reasoning="\n<think>{r}</think>\n{c}",
        divides=True,
        call=call_glm,
    ),
    "gptoss": Rules(
        ("<|return|>", "<|endoftext|>", "<|call|>"),
        opening="<|channel|>final<|message|>",
        reasoning=(
            "<|channel|>analysis<|message|>{r}<|end|><|start|>assistant"
            "<|channel|>final<|message|>{c}"
        ),
        call=call_harmony,
        call_closing="<|call|>",
        strange=("<|channel|>",),
    ),
    "idefics3": PARTS,
    "lfm2": LFM2,
    "lfm2_2_5": LFM25,
    "lfm2_2_5_v2": LFM25,
    "lfm2_2_5_vl": LFM25,
    "lfm2_v2": replace(LFM2, call=call_python),
    "llama3": LLAMA3,
    "llama3_1": LLAMA31,
    "llama3_2": LLAMA31,
    "llava_next": Rules(("</s>",), opening=" ", parts=True),
    "muse_glimmer": Rules(
        ("<|eot|>",),
        opening=" to=user<|message|>",
        reasoning=" to=self<|message|>{r}<|eom|><|start|>assistant to=user<|message|>{c}",
        call=call_atem,
    ),
    "nemotron_3_5_lightning": NEMOTRON_TIGHT,
    "nemotron_3_nano": NEMOTRON,
    "nemotron_3_super": NEMOTRON,
    "nemotron_3_ultra": NEMOTRON_TIGHT,
    "phi3": PHI3,
    "phi3_5": PHI3,
    "qwen2_5": QWEN25,
    "qwen2_5_vl": CHATML,
    "qwen3": QWEN3,
    "qwen3_5_nothink": QWEN35,
    "qwen3_5_think": QWEN35,
    "qwen3_6": QWEN35,
    "qwen3_8": replace(QWEN35, divides=False),
    "qwen3_instruct_2507": QWEN25,
    "qwen3_vl": QWEN25,
    "smolvlm": PARTS,
}


def source(name: str) -> str:
    """The text of a template."""
    return (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")


def control_tokens(name: str) -> tuple[str, ...]:
    """The control tokens of the template's model, BOS `<s>` first."""
    written = CONTROL.findall(source(name))
    ends = RULES[name.removesuffix("_training")].ends
    return tuple(dict.fromkeys(["<s>", *ends, *sorted(written)]))


def formed(name: str, messages: list[Message]) -> list[Message]:
    """The messages as the template wants them, for renderings without solotune."""
    rules = RULES[name.removesuffix("_training")]
    made: list[Message] = []
    for message in messages:
        new = dict(message)
        if "reasoning_content" in message:
            new |= {
                "thinking": message["reasoning_content"],
                "reasoning": message["reasoning_content"],
            }
        if calls := message.get("tool_calls"):
            new["content"] = message["content"] or rules.empty_content
            if rules.arguments_as_text and name != "deepseekv3_training":
                new["tool_calls"] = [
                    call
                    | {
                        "function": call["function"]
                        | {
                            "arguments": json.dumps(
                                call["function"]["arguments"], ensure_ascii=False
                            )
                        }
                    }
                    for call in calls
                ]
        if rules.parts:
            new["content"] = [{"type": "text", "text": message["content"]}]
        made.append(new)
    return made
