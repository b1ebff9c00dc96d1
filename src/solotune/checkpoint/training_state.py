"""What a run needs besides the weights to go on exactly: optimizer state, generators, progress.

    training_state/state.json             progress, generators, versions, threads, state layout
    training_state/optimizer.safetensors  `<parameter>.<state>[.<inner>]`; `<parameter>.weight_fp32`
                                          where the weights in the folder are a narrower copy

Tensor subclasses (torchao's low-bit state) are taken apart and put together by their own
`__tensor_flatten__`. Nothing is cast: torch's `load_state_dict` turns the fp32 state of bf16
weights into bf16, and bitsandbytes' does it to all that it does not know by name. No pickle.

The optimizer's options (rates, decay) are not state: they come from the config of the resumed run.
"""

import importlib
import json
import random
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from solotune.checkpoint.safetensors_file import (
    SourceTensor,
    StoredTensor,
    read_header,
    write_file,
)
from solotune.checkpoint.save import write_json
from solotune.errors import CheckpointError
from solotune.models.decoder import Decoder

FOLDER = "training_state"
FORMAT = 1
EXACT = "weight_fp32"
_KEYS = ("progress", "optimizer", "parameters", "state", "generators", "environment")
PACKAGES = ("solotune", "torch", "torchao", "bitsandbytes")
TENSOR_MODULES = ("torchao.optim.",)  # whose tensor classes a state file may name


class TrainingState:
    """The state of a run at one moment, described but not copied.

    `dtype` is that of the weights in the folder; None: what is trained is there as it is.
    """

    def __init__(
        self,
        *,
        model: Decoder,
        optimizer: Optimizer,
        progress: dict[str, Any],
        dtype: torch.dtype | None,
    ) -> None:
        self._device = device = model.device  # of the state of streamed weights too
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # paged state is host memory that kernels write
        self.sources: list[SourceTensor] = []
        states = {}
        for name, parameter in _optimized(model, optimizer):
            state = optimizer.state.get(parameter, {})
            states[name] = {
                key: self._describe(f"{name}.{key}", value, parameter)
                for key, value in state.items()
            }
        for name, parameter in model.named_parameters():
            if parameter.dtype == torch.float32 and dtype not in (None, torch.float32):
                self._describe(f"{name}.{EXACT}", parameter.detach(), parameter)
        self._state = {
            "format": FORMAT,
            "progress": progress,
            "optimizer": _class_name(optimizer),
            "parameters": {
                name: {"shape": list(parameter.shape), "dtype": _dtype_name(parameter.dtype)}
                for name, parameter in _optimized(model, optimizer)
            },
            "frozen": _frozen(model, optimizer),
            "state": states,
            "generators": _generators(device),
            "environment": _environment(device),
        }

    @property
    def num_bytes(self) -> int:
        return sum(source.num_bytes for source in self.sources)

    def write(self, folder: Path) -> None:
        """Write `folder`/training_state; raises OSError."""
        (folder / FOLDER).mkdir()
        write_file(folder / FOLDER / "optimizer.safetensors", self.sources)
        write_json(folder / FOLDER / "state.json", self._state)

    def _describe(self, key: str, value: Any, parameter: Tensor) -> dict[str, Any]:
        """Return how a piece of `parameter`'s state is stored, and remember its tensors."""
        if value is None or isinstance(value, bool | int | float | str):
            return {"value": value}
        if not isinstance(value, Tensor):
            raise CheckpointError(
                f"the optimizer keeps a {type(value).__name__} as {key}, which cannot be saved: "
                "use another optimizer"
            )
        if type(value) is Tensor:
            self.sources.append(SourceTensor(key, value.dtype, tuple(value.shape), lambda: value))
            # State that lives on the host between steps belongs with its parameter all the same.
            with_parameter = value.device == self._device or value.numel() == parameter.numel()
            return {"with_parameter": with_parameter}
        names, context = value.__tensor_flatten__()  # type: ignore[attr-defined]
        return {
            "class": _class_name(value),
            "context": [_to_json(item) for item in context],
            "shape": list(value.shape),
            "stride": list(value.stride()),
            "inner": {
                name: self._describe(f"{key}.{name}", getattr(value, name), parameter)
                for name in names
            },
        }


def load_training_state(
    folder: Path,
    *,
    model: Decoder,
    optimizer: Optimizer,
    keep: Callable[[nn.Parameter], None] = lambda parameter: None,
) -> dict[str, Any]:
    """Restore optimizer state, exact weights and generators of a step folder; return its progress.

    Raises CheckpointError if the folder has none, or if it is of other parameters or another
    optimizer than the ones at hand.
    """
    state = _read(folder)
    path = folder / FOLDER / "optimizer.safetensors"
    stored = read_header(path)
    _check_fit(folder, state, model, optimizer)

    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    try:
        for name, parameter in _optimized(model, optimizer):
            group, like = groups[id(parameter)], parameter
            if parameter.device != model.device:  # streamed: it steps on the device all the same
                like = torch.empty_like(parameter, device=model.device)
            restored = {
                key: _restore(f"{name}.{key}", entry, stored, like, group, optimizer)
                for key, entry in state["state"][name].items()
            }
            if restored:
                optimizer.state[parameter] = restored
                keep(parameter)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                exact = stored.get(f"{name}.{EXACT}")
                if exact is not None:
                    parameter.copy_(exact.read())
    except KeyError as error:
        raise CheckpointError(
            f"{path} lacks {error.args[0]}: resume from another step folder"
        ) from error
    _set_generators(state["generators"], model.device)
    return state["progress"]


def check_readable(folder: Path) -> None:
    """Raise CheckpointError unless `folder` holds a training state whose files are whole."""
    _read(folder)
    read_header(folder / FOLDER / "optimizer.safetensors")


def environment_changes(folder: Path, *, device: torch.device) -> list[str]:
    """Return one line for each version or setting that differs from the saved run's.

    With any of them the resumed run is correct, but need not be bit-equal to the uninterrupted one.
    """
    now = _environment(device)
    before = _read(folder)["environment"]
    return [
        f"{name}: {before.get(name)} when saved, {now.get(name)} now"
        for name in dict.fromkeys([*before, *now])
        if before.get(name) != now.get(name)
    ]


def resume_lines(asked: bool | str | None, folder: Path | None, device: torch.device) -> list[str]:
    """Return the facts to print about a resume: from where, and what differs from the saved run."""
    if folder is None:
        return ["resume: no step is saved yet, starting at the beginning"] if asked else []
    changes = environment_changes(folder, device=device)
    warning = ["resume: correct, but not bit-equal to an uninterrupted run"] if changes else []
    return [f"resume: from {folder}", *(f"resume: {change}" for change in changes), *warning]


def _read(folder: Path) -> dict[str, Any]:
    path = folder / FOLDER / "state.json"
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{folder} has no {FOLDER}: only the newest step folder of a run can be resumed"
        ) from error
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    except ValueError:
        state = None
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} is damaged: resume from another step folder")
    if state.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} has the format {state.get('format')}, this version reads {FORMAT}: "
            f"resume with solotune {state.get('environment', {}).get('solotune')}"
        )
    if missing := [key for key in _KEYS if not isinstance(state.get(key), dict | str)]:
        raise CheckpointError(f"{path} lacks {missing[0]}: resume from another step folder")
    return state


def _check_fit(folder: Path, state: dict, model: Decoder, optimizer: Optimizer) -> None:
    if state["optimizer"] != _class_name(optimizer):
        raise CheckpointError(
            f"{folder} was saved with optimizer={state['optimizer']}, this run has "
            f"{_class_name(optimizer)}: set it back, or start anew with "
            f"checkpoint_dir={folder}"
        )
    saved: dict[str, dict] = state["parameters"]
    ours = dict(_optimized(model, optimizer))
    for name in [*saved, *ours]:
        if name not in ours or name not in saved:
            where = "saved run" if name in saved else "run at hand"
            raise CheckpointError(
                f"{folder} does not fit: {name} is trained only in the {where}; resume with the "
                "saved run's config.yaml"
            )
        now = {"shape": list(ours[name].shape), "dtype": _dtype_name(ours[name].dtype)}
        if now != saved[name]:
            raise CheckpointError(
                f"{folder} does not fit: {name} was {saved[name]['dtype']} {saved[name]['shape']} "
                f"and is {now['dtype']} {now['shape']}; resume with the saved run's config.yaml"
            )

    frozen = _frozen(model, optimizer)
    for name, dtype in state.get("frozen", {}).items():
        if (now := frozen.get(name)) != dtype:
            raise CheckpointError(
                f"{folder} does not fit: {name} was {dtype} and is {now}; resume with the saved "
                "run's config.yaml"
            )


def _frozen(model: Decoder, optimizer: Optimizer) -> dict[str, str]:
    """Return the dtypes of the parameters that the optimizer does not have, by name."""
    trained = dict(_optimized(model, optimizer))
    named = model.named_parameters()
    return {name: _dtype_name(p.dtype) for name, p in named if name not in trained}


def _optimized(model: Decoder, optimizer: Optimizer) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield (name, parameter) of what the optimizer has, in the model's order."""
    ids = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return ((name, p) for name, p in model.named_parameters() if id(p) in ids)


def _restore(
    key: str,
    entry: dict[str, Any],
    stored: dict[str, StoredTensor],
    parameter: Tensor,
    group: dict[str, Any],
    optimizer: Optimizer,
) -> Any:
    if "value" in entry:
        return entry["value"]
    if "class" in entry:
        inner = {
            name: _restore(f"{key}.{name}", part, stored, parameter, group, optimizer)
            for name, part in entry["inner"].items()
        }
        context = [_from_json(item) for item in entry["context"]]
        unflatten = _tensor_class(entry["class"]).__tensor_unflatten__
        return unflatten(inner, context, torch.Size(entry["shape"]), tuple(entry["stride"]))
    tensor, state = stored[key].read(), key.rpartition(".")[2]
    if parameter.device.type == "cpu":
        return tensor
    if getattr(optimizer, "is_paged", False) and state in ("state1", "state2"):
        # bitsandbytes: memory that the driver pages; only the optimizer can allocate it.
        return optimizer.get_state_buffer(parameter, dtype=tensor.dtype).copy_(tensor)  # type: ignore[attr-defined]
    if state == "step" and not (group.get("fused") or group.get("capturable")):
        return tensor  # torch counts on the host, unless its kernels read the count
    return tensor.to(parameter.device) if entry["with_parameter"] else tensor


def _tensor_class(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    found = None
    if module.startswith(TENSOR_MODULES):
        found = getattr(importlib.import_module(module), attribute, None)
    if not (isinstance(found, type) and issubclass(found, Tensor)):
        raise CheckpointError(f"the training state names the tensor class {name}, which is refused")
    return found


def _generators(device: torch.device) -> dict[str, Any]:
    states = {
        "python": random.getstate(),
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device).numpy().tobytes().hex()
    return states


def _set_generators(states: dict[str, Any], device: torch.device) -> None:
    kind, numbers, gauss = states["python"]
    random.setstate((kind, tuple(numbers), gauss))
    torch.set_rng_state(_bytes_tensor(states["torch"]))
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(_bytes_tensor(states["cuda"]), device)


def _bytes_tensor(text: str) -> Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)


def _environment(device: torch.device) -> dict[str, Any]:
    return {
        "python": ".".join(map(str, sys.version_info[:3])),
        **{name: package_version(name) for name in PACKAGES},
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "threads": torch.get_num_threads(),
    }


def package_version(package: str) -> str | None:
    """Return the installed version of a package, None where it is missing."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _to_json(item: Any) -> Any:
    if isinstance(item, torch.dtype):
        return {"dtype": _dtype_name(item)}
    if isinstance(item, torch.Size):
        return {"size": list(item)}
    assert item is None or isinstance(item, bool | int | float | str), item
    return item


def _from_json(item: Any) -> Any:
    if not isinstance(item, dict):
        return item
    return torch.Size(item["size"]) if "size" in item else getattr(torch, item["dtype"])


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _class_name(instance: object) -> str:
    return f"{type(instance).__module__}.{type(instance).__qualname__}"
